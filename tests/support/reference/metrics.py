"""docs/metrics.md, from the metrics' help texts."""

from __future__ import annotations

from prometheus_client.core import Metric

from cluster.routing.metrics import Metrics
from cluster.routing.vllm_metrics import MADE, SAME
from cluster.state.journal import journal_counters
from tests.support.reference.markdown import made_from, table

METRICS = """\
# Metrics

{made}

`GET /metrics` at the address of `--http` answers in Prometheus' text format. The router counts what happens to
requests. Nodes report their own numbers with their leases: these are up to a quarter of `lease_ttl_s` old, begin at 0
when a node starts, and vanish with the node. A *choice* is one of the `n` answers of a request. A *round* drafts tokens
and verifies them in one forward pass of the model. The *bonus token* is the one that every round yields besides the
drafts that it accepts.

```yaml
scrape_configs:
  - job_name: paceline
    static_configs:
      - targets: ["127.0.0.1:8000"]
```

Some questions and the queries that answer them:

{queries}
Every metric, by subject. A histogram has `_bucket`, `_sum` and `_count`.
"""

QUERIES = (
    ("output tokens per second", "rate(paceline_completion_tokens_total[1m])"),
    (
        "tokens gained per round",
        "1 + rate(paceline_spec_accepted_tokens_total[5m]) / rate(paceline_spec_rounds_total[5m])",
    ),
    (
        "share of hand-off time that prefill does not hide",
        "rate(paceline_handoff_exposed_seconds_sum[5m]) / rate(paceline_handoff_transfer_seconds_sum[5m])",
    ),
    (
        "share of prompt tokens found in a prefix cache",
        "rate(paceline_cached_prompt_tokens_total[5m]) / rate(paceline_prompt_tokens_total[5m])",
    ),
    ("share of a node's KV pages in use", "1 - paceline_node_kv_pages_free / paceline_node_kv_pages"),
    (
        "share of their time that a node's threads had no core",
        "rate(paceline_node_missed_seconds_total[5m]) / rate(paceline_node_shared_seconds_total[5m])",
    ),
    (
        "share of rounds in which copying found something",
        'sum by (drafter) (rate(paceline_node_copy_rounds_total{result="hit"}[5m]))'
        " / sum by (drafter) (rate(paceline_node_copy_rounds_total[5m]))",
    ),
)
VLLM = """\
## Names of vLLM

With `--vllm-metrics` these are shown too, for dashboards that are made for vLLM. Each has the labels `model_name` and
`engine`, which is always 0. Counters end with `_total`. Positions of drafts begin at 0 here, and
`vllm:request_success_total` has the label `finished_reason`. Tokens of prompts count when their choice is complete.
"""
SECTIONS = {  # by prefix; the last takes what no other has, and comes first on the page
    "journal_": "Journal",
    "node": "Nodes",
    "handoff_": "Hand-off",
    "spec_": "Speculation",
    "": "Requests and tokens",
}


def metrics_page() -> str:
    """docs/metrics.md."""
    metrics = Metrics()
    metrics.watch_nodes(list)
    journal_counters(metrics.registry)
    made = made_from("cluster/routing/metrics.py, cluster/routing/vllm_metrics.py and cluster/state/journal.py")
    queries = table(("question", "query"), [(question, f"`{query}`") for question, query in QUERIES])
    parts = [METRICS.format(made=made, queries=queries)]
    found = sorted(metrics.registry.collect(), key=lambda metric: metric.name)
    for section in reversed(SECTIONS.values()):
        rows = [_metric_row(metric) for metric in found if _section(metric) == section]
        parts.append(f"## {section}\n\n{table(('metric', 'type', 'meaning'), rows)}")
    return "\n".join([*parts, _vllm_names()])


def _vllm_names() -> str:
    rows = [(f"`{name}`", f"`{source}`") for name, (source, _) in sorted(SAME.items())]
    return (
        VLLM
        + "\n"
        + table(("vLLM's", "what it is made of"), [*rows, *((f"`{name}`", text) for name, text in MADE.items())])
    )


def _section(metric: Metric) -> str:
    name = metric.name.removeprefix("paceline_")
    return next(section for prefix, section in SECTIONS.items() if name.startswith(prefix))


def _metric_row(metric: Metric) -> tuple[str, ...]:
    name = metric.name + ("_total" if metric.type == "counter" else "")
    return f"`{name}`", metric.type, metric.documentation
