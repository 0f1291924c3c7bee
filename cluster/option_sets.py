"""Which options of a deployment a router that joins has by itself, and which it takes over."""

from __future__ import annotations

from paceline.engine_config import EngineConfig
from paceline.role_options import ROLES

# Options of ``paceline router``. All others are the deployment's that it joins, or say what nodes there are.
ROUTER_OPTIONS = (
    *("deployment", "grpc", "http", "http_cors_origins", "vllm_metrics", "tls_dir", "secret_file", "api_keys"),
    *("admin", "ray_address", "open_metrics", "audit_calls", "insecure", "log_level", "log_format"),
    *("trace_requests", "drain_timeout_s"),
)

# Options that every router of a deployment has alike; those that join take them over. The others are a process's own,
# or say what nodes there are.
SHARED_OPTIONS = frozenset(EngineConfig.model_fields.keys() - {"log_level", "log_format", "trace_requests"}) | {
    *("chat_template", "tool_call_parser", "reasoning_parser", "max_inflight", "max_queued", "queue_timeout_s"),
    *("request_timeout_s", "bypass_tokens", "lease_ttl_s", "journal_mode", "journal_ttl_s", "journal_entry_bytes"),
    *("journal_total_bytes", "tenant_share", "read_timeout_s", "served_model_name"),
    "stream_interval_ms",
    *ROLES,
}

# Options that nodes are started with: those of an earlier supervisor that had others are not gone on with.
NODE_OPTIONS = {*SHARED_OPTIONS.intersection(EngineConfig.model_fields), *ROLES}
