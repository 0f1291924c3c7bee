"""What the router counts, for Prometheus: /metrics and docs/metrics.md show it.

A help text names the labels and their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from cluster.state.registry_types import NodeRecord
from paceline.results import Completion, HandoffBytes

CONTENT_TYPE = CONTENT_TYPE_LATEST

_TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_GAP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_HANDOFF_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_E2E_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = tuple(leading * 10**power for power in range(6) for leading in (1, 2, 5))
_LENGTHS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)
# Name without "paceline_": help text, then labels. A help text names the values of the labels.
_COUNTERS: dict[str, tuple[str, ...]] = {
    "requests": ("Requests that ended, by status: ok, cancelled or the class of the error.", "status"),
    "ignored_fields": (
        "HTTP requests with a field that cannot change the text and is ignored, by field as its request names it.",
        "field",
    ),
    "prompt_tokens": ("Prompt tokens of completed choices; a request with n choices counts its prompt n times.",),
    "cached_prompt_tokens": ("Prompt tokens of completed choices that came from a prefix cache.",),
    "prefix_hint_tokens": (
        "Prompt tokens that chosen nodes were expected to have in their prefix caches, by role: prefill or decode.",
        "role",
    ),
    "prefix_hit_tokens": (
        "Prompt tokens that chosen nodes did have in their prefix caches, by role: prefill or decode.",
        "role",
    ),
    "bypassed": ("Prompts so short that a decode node computed them itself (option bypass_tokens).",),
    "completion_tokens": ("Output tokens sent to clients.",),
    "choices": ("Choices that are complete, by finish_reason: stop, length, abort or tool_calls.", "finish_reason"),
    "access_refused": (
        "Refused callers, by reason: Unauthenticated, PermissionDenied, UnknownId (not the tenant's), OtherTenant, "
        "Handshake (of TLS), or the quota that is used up, such as concurrency.",
        "reason",
    ),
    "retries": ("Attempts at a choice that failed and were made again, by class of the error.", "error"),
    "spec_rounds": ("Draft-verify rounds of completed choices, one target forward each.",),
    "spec_draft_tokens": ("Draft tokens that the target verified.",),
    "spec_accepted_tokens": ("Draft tokens that were accepted; bonus tokens do not count.",),
    "spec_rounds_by_drafter": ("Draft-verify rounds of completed choices, by drafter.", "drafter"),
    "spec_draft_seconds": ("Seconds of drafting; a round of several choices counts once for each.",),
    "spec_verify_seconds": ("Seconds of target forwards and acceptance; a round counts once for each choice.",),
    "spec_lossy_choices": ("Completed choices whose acceptance rule may change the text (typical).",),
    "spec_drafted_per_position": (
        "Rounds that drafted a token at this position; 1 is the first after the last committed token.",
        "position",
    ),
    "spec_accepted_per_position": ("Rounds that accepted a draft token at this position.", "position"),
    "handoff_bytes": (
        "Bytes handed over from prefill to decode nodes, by byte_class: target_kv, draft_kv, hidden or meta.",
        "byte_class",
    ),
}
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Seconds from a request's arrival to the first token of a choice.", _TTFT_S),
    "inter_token_seconds": (
        "Seconds per output token after the first; tokens told together share their time.",
        _GAP_S,
    ),
    "request_seconds": ("Seconds from a request's arrival to the end of a choice.", _E2E_S),
    "queue_seconds": ("Seconds that a request waited at the router before it ran; refused ones do not count.", _TTFT_S),
    "prompt_length_tokens": ("Tokens of the prompt of a completed choice.", _TOKENS),
    "output_length_tokens": ("Tokens of a completed choice.", _TOKENS),
    "handoff_exposed_seconds": (
        "Seconds from the end of a prompt's computation to the acknowledgement of its hand-off.",
        _HANDOFF_S,
    ),
    "handoff_transfer_seconds": ("Seconds during which bytes of a hand-off were being sent.", _HANDOFF_S),
    "spec_acceptance_length": ("Tokens that a choice gained per round, the bonus token included.", _LENGTHS),
}
_GAUGES: dict[str, tuple[str, ...]] = {
    "requests_running": ("Requests that run now.",),
    "requests_queued": ("Requests that wait at the router for their turn.",),
    "registry_stale_seconds": ("Seconds since Redis last told the router of its nodes.",),
    "quotas_alone": ("1 while this router counts quotas for itself, since Redis is away.",),
    "node_breaker": ("Circuit breaker of a node: 0 closed (in use), 0.5 half-open, 1 open (left out).", "node"),
}
_NODE_GAUGES: dict[str, tuple[str, str]] = {  # and the field of the node's record
    "node_ranks": ("Ranks of a node: processes that share its model (options prefill_tp and decode_tp).", "ranks"),
    "node_sequences_running": ("Sequences that a node works on now.", "running"),
    "node_sequences_waiting": ("Sequences that wait on a node for KV pages.", "waiting"),
    "node_kv_pages": ("KV pages of a node (option kv_cache_tokens over page_size).", "total_pages"),
    "node_kv_pages_free": ("KV pages that new sequences can get on a node; cached prefixes give way.", "free_pages"),
}
_NODE_COUNTERS: dict[str, tuple[str, str, float]] = {  # likewise, and what one of it is worth
    "node_missing_drafts": (
        "Sequences that reached a decode node without the state of their drafter, so that speculation began late.",
        "missing_drafts",
        1,
    ),
    "node_refused_calls": (
        "Calls and hand-offs that a node refused because of who made them, and handshakes that failed. "
        "The audit log has a line of each.",
        "refused_calls",
        1,
    ),
    "node_refused_messages": (
        "Messages that a node refused for what they say: none of its RPC's, or what no prefill node sends on a link. "
        "Frames that are no HTTP/2 end their connection in gRPC, uncounted.",
        "refused_messages",
        1,
    ),
    "node_shared_seconds": (
        "Seconds of steps that several threads of a node shared; 0 where it has cores of its own.",
        "shared_ms",
        1e-3,
    ),
    "node_missed_seconds": (
        "Seconds of these in which one of the threads of the node had no core. Above 40 %, others crowd the cores.",
        "missed_ms",
        1e-3,
    ),
}


class Metrics:
    """One registry per deployment, so that two in one process do not mix."""

    # It has over 20 methods, since each event that is counted has one, of two lines.

    def __init__(self) -> None:
        self.registry = into = CollectorRegistry()
        self._before_render: list[Callable[[], None]] = []
        self._counters = {
            name: Counter(f"paceline_{name}", text, labels, registry=into)
            for name, (text, *labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"paceline_{name}", text, buckets=buckets, registry=into)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._gauges = {
            name: Gauge(f"paceline_{name}", text, labels, registry=into) for name, (text, *labels) in _GAUGES.items()
        }

    def watch_nodes(self, nodes: Callable[[], Sequence[NodeRecord]]) -> None:
        """Show what nodes report with their leases. nodes: those alive; called at every scrape."""
        self.registry.register(NodeMetrics(nodes))

    def watch_registry(self, stale_for_s: Callable[[], float]) -> None:
        """Show how old the view of the nodes is. stale_for_s: called at every scrape."""
        self._gauges["registry_stale_seconds"].set_function(stale_for_s)

    def before_render(self, refresh: Callable[[], None]) -> None:
        """Have gauges set by ``refresh`` whenever they are read."""
        self._before_render.append(refresh)

    def set_breakers(self, states: Mapping[str, float]) -> None:
        """Show breakers by node id: 0 closed, 0.5 half-open, 1 open. Nodes that are not there are forgotten."""
        self._gauges["node_breaker"].clear()
        for node_id, state in states.items():
            self._gauges["node_breaker"].labels(node_id).set(state)

    def set_queued(self, requests: int) -> None:
        """Requests that wait for their turn."""
        self._gauges["requests_queued"].set(requests)

    def request_started(self, queued_s: float) -> None:
        """A request runs, after ``queued_s`` in the queue."""
        self._gauges["requests_running"].inc()
        self._histograms["queue_seconds"].observe(queued_s)

    def request_ended(self, status: str) -> None:
        """A request that ran is over. status: ok, cancelled, or the error's class."""
        self._gauges["requests_running"].dec()
        self._counters["requests"].labels(status).inc()

    def request_refused(self, status: str) -> None:
        """A request is over and never ran."""
        self._counters["requests"].labels(status).inc()

    def access_refused(self, reason: str) -> None:
        """A caller was refused. reason: the error's class, what the call named, a quota, or Handshake."""
        self._counters["access_refused"].labels(reason).inc()

    def quotas_alone(self, alone: bool) -> None:
        """Whether this router counts quotas for itself, since Redis is away."""
        self._gauges["quotas_alone"].set(alone)

    def fields_ignored(self, fields: Iterable[str]) -> None:
        """A request has these fields, which are known and not looked at."""
        for name in fields:
            self._counters["ignored_fields"].labels(name).inc()

    def first_token(self, seconds: float) -> None:
        """The first token of a choice is on its way."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        self._counters["completion_tokens"].inc()

    def tokens(self, count: int, seconds: float) -> None:
        """``count`` more tokens of a choice, ``seconds`` after those before them."""
        self._counters["completion_tokens"].inc(count)
        for _ in range(count):
            self._histograms["inter_token_seconds"].observe(seconds / count)

    def prefix_hit(self, role: str, hinted_tokens: int, cached_tokens: int) -> None:
        """A node was chosen for what the index says of its prefix cache, and has said what it has."""
        self._counters["prefix_hint_tokens"].labels(role).inc(hinted_tokens)
        self._counters["prefix_hit_tokens"].labels(role).inc(cached_tokens)

    def bypassed(self) -> None:
        """A decode node computed a short prompt itself though there was a prefill node."""
        self._counters["bypassed"].inc()

    def retried(self, error: str) -> None:
        """An attempt failed with this class of error."""
        self._counters["retries"].labels(error).inc()

    def handed_off(self, handoff: HandoffBytes, exposed_s: float, transfer_s: float) -> None:
        """A hand-off is complete."""
        for name in ("target_kv", "draft_kv", "hidden", "meta"):
            self._counters["handoff_bytes"].labels(name).inc(getattr(handoff, name))
        self._histograms["handoff_exposed_seconds"].observe(exposed_s)
        self._histograms["handoff_transfer_seconds"].observe(transfer_s)

    def choice_ended(self, completion: Completion) -> None:
        """A choice is complete."""
        usage, spec = completion.usage, completion.speculation
        self._counters["choices"].labels(completion.finish_reason.value).inc()
        self._histograms["prompt_length_tokens"].observe(usage.prompt_tokens)
        self._histograms["output_length_tokens"].observe(usage.completion_tokens)
        self._counters["prompt_tokens"].inc(usage.prompt_tokens)
        self._counters["cached_prompt_tokens"].inc(usage.cached_tokens)
        self._histograms["request_seconds"].observe(completion.timing.e2e_s)
        self._counters["spec_rounds"].inc(spec.rounds)
        self._counters["spec_draft_tokens"].inc(spec.draft_tokens)
        self._counters["spec_accepted_tokens"].inc(spec.accepted_tokens)
        for counts, metric in (
            (spec.drafted_per_position, self._counters["spec_drafted_per_position"]),
            (spec.accepted_per_position, self._counters["spec_accepted_per_position"]),
        ):
            for position, count in enumerate(counts, 1):
                metric.labels(str(position)).inc(count)
        for drafter, rounds in spec.rounds_by_drafter.items():
            self._counters["spec_rounds_by_drafter"].labels(drafter).inc(rounds)
        self._counters["spec_draft_seconds"].inc(spec.draft_s)
        self._counters["spec_verify_seconds"].inc(spec.verify_s)
        self._counters["spec_lossy_choices"].inc(not spec.lossless)
        if spec.rounds:
            self._histograms["spec_acceptance_length"].observe(spec.acceptance_length)

    def own(self) -> Iterable[Metric]:
        """What is counted here, without what nodes report."""
        for metrics in (self._counters, self._histograms, self._gauges):
            for metric in metrics.values():
                yield from metric.collect()

    def render(self) -> bytes:
        """The text exposition."""
        for refresh in self._before_render:
            refresh()
        return generate_latest(self.registry)


class NodeMetrics(Collector):
    """What nodes report with their leases; a node that is gone has no series."""

    def __init__(self, nodes: Callable[[], Sequence[NodeRecord]]) -> None:
        self._nodes = nodes

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        nodes = self._nodes()
        alive = GaugeMetricFamily(
            "paceline_nodes", "Nodes under a live lease, by role: prefill or decode.", None, ["role"]
        )
        for role in ("prefill", "decode"):
            alive.add_metric([role], sum(node.role == role for node in nodes))
        yield alive
        for name, (text, field) in _NODE_GAUGES.items():
            gauge = GaugeMetricFamily(f"paceline_{name}", text, None, ["node"])
            for node in nodes:
                gauge.add_metric([node.id], getattr(node, field))
            yield gauge
        for name, (text, field, unit) in _NODE_COUNTERS.items():
            counter = CounterMetricFamily(f"paceline_{name}", text, None, ["node"])
            for node in nodes:
                counter.add_metric([node.id], getattr(node, field) * unit)
            yield counter
        copies = CounterMetricFamily(
            "paceline_node_copy_rounds",
            "Rounds in which a drafter of the node looked for text to copy, by result: hit (it drafted) or miss.",
            None,
            ["node", "drafter", "result"],
        )
        for node in nodes:
            for drafter, (hits, misses) in node.copies.items():
                copies.add_metric([node.id, drafter, "hit"], hits)
                copies.add_metric([node.id, drafter, "miss"], misses)
        yield copies
