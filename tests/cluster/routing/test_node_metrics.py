"""What nodes report with their leases, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cluster.routing.metrics import Metrics
from cluster.state.registry_types import NodeRecord


def samples(metrics: Metrics, prefix: str = "paceline_node") -> dict[tuple[str, ...], float]:
    """Values by name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


def test_series_follow_the_nodes() -> None:
    nodes = [
        NodeRecord("prefill-0", "prefill", 1, "h:1", ranks=4, running=1, waiting=2, free_pages=3, total_pages=4),
        NodeRecord(
            *("decode-0", "decode", 1, "h:2"),
            missing_drafts=5,
            refused_calls=10,
            refused_messages=11,
            shared_ms=1500,
            missed_ms=250,
            copies={"ngram": (6, 7), "suffix": (8, 9)},
        ),
    ]
    metrics = Metrics()
    metrics.watch_nodes(lambda: nodes)
    found = samples(metrics)
    assert found["paceline_nodes", "prefill"] == found["paceline_nodes", "decode"] == 1
    for name, value in (
        ("ranks", 4),
        ("sequences_running", 1),
        ("sequences_waiting", 2),
        ("kv_pages_free", 3),
        ("kv_pages", 4),
    ):
        assert found[f"paceline_node_{name}", "prefill-0"] == value
    for name, total in (
        ("missing_drafts", 5),
        ("refused_calls", 10),
        ("refused_messages", 11),
        ("shared_seconds", 1.5),
        ("missed_seconds", 0.25),
    ):
        assert found[f"paceline_node_{name}_total", "decode-0"] == total
    copies = {key[1:]: value for key, value in found.items() if key[0] == "paceline_node_copy_rounds_total"}
    assert copies == {
        ("ngram", "decode-0", "hit"): 6,
        ("ngram", "decode-0", "miss"): 7,
        ("suffix", "decode-0", "hit"): 8,
        ("suffix", "decode-0", "miss"): 9,
    }
    del nodes[1]
    found = samples(metrics)
    assert found["paceline_nodes", "decode"] == 0
    assert not any("decode-0" in key for key in found)
