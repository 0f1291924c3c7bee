"""Metrics of the router under the names that vLLM has for the same, for dashboards made for it.

Only what both count alike is here. `SAME` names the source of each, `MADE` those that are made of several;
docs/metrics.md shows both. Every series has vLLM's label ``model_name``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cluster.routing.metrics import Metrics
from cluster.state.registry_types import NodeRecord

# vLLM's name, without a counter's "_total" -> ours, and a label of ours with vLLM's name for it.
SAME: dict[str, tuple[str, dict[str, str]]] = {
    "vllm:num_requests_running": ("paceline_requests_running", {}),
    "vllm:num_requests_waiting": ("paceline_requests_queued", {}),
    "vllm:prompt_tokens": ("paceline_prompt_tokens", {}),
    "vllm:generation_tokens": ("paceline_completion_tokens", {}),
    "vllm:prefix_cache_queries": ("paceline_prompt_tokens", {}),
    "vllm:prefix_cache_hits": ("paceline_cached_prompt_tokens", {}),
    "vllm:request_success": ("paceline_choices", {"finish_reason": "finished_reason"}),
    "vllm:time_to_first_token_seconds": ("paceline_time_to_first_token_seconds", {}),
    "vllm:inter_token_latency_seconds": ("paceline_inter_token_seconds", {}),
    "vllm:time_per_output_token_seconds": ("paceline_inter_token_seconds", {}),  # its name until vLLM 0.11
    "vllm:e2e_request_latency_seconds": ("paceline_request_seconds", {}),
    "vllm:request_queue_time_seconds": ("paceline_queue_seconds", {}),
    "vllm:request_prompt_tokens": ("paceline_prompt_length_tokens", {}),
    "vllm:request_generation_tokens": ("paceline_output_length_tokens", {}),
    "vllm:spec_decode_num_drafts": ("paceline_spec_rounds", {}),
    "vllm:spec_decode_num_draft_tokens": ("paceline_spec_draft_tokens", {}),
    "vllm:spec_decode_num_accepted_tokens": ("paceline_spec_accepted_tokens", {}),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("paceline_spec_accepted_per_position", {"position": "position"}),
}
MADE = {
    "vllm:kv_cache_usage_perc": "The share of the decode nodes' KV pages that no new sequence can get, 0 to 1.",
    "vllm:num_preemptions": "0: nothing is preempted.",
}


class VllmMetrics(Collector):
    """What a registry shows besides, read from the metrics of ours at every scrape."""

    def __init__(self, metrics: Metrics, model: str, nodes: Callable[[], Sequence[NodeRecord]]) -> None:
        """nodes: those alive; called at every scrape."""
        self._metrics, self._nodes = metrics, nodes
        self._labels = {"model_name": model, "engine": "0"}

    def describe(self) -> Iterable[Metric]:
        """See Collector: nothing is read before the first scrape."""
        return []

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        ours = {metric.name: metric for metric in self._metrics.own()}
        for name, (source, labels) in SAME.items():
            yield self._renamed(ours[source], name, labels)
        yield from self._made()

    def _renamed(self, metric: Metric, name: str, labels: dict[str, str]) -> Metric:
        made = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            if sample.name.endswith("_created"):
                continue
            told = {labels.get(label, label): value for label, value in sample.labels.items()}
            if "position" in told:  # vLLM's begin at 0
                told["position"] = str(int(told["position"]) - 1)
            made.samples.append(
                Sample(name + sample.name.removeprefix(metric.name), {**self._labels, **told}, sample.value)
            )
        return made

    def _made(self) -> Iterator[Metric]:
        decodes = [node for node in self._nodes() if node.role == "decode"]
        pages, free = sum(node.total_pages for node in decodes), sum(node.free_pages for node in decodes)
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", MADE["vllm:kv_cache_usage_perc"], None, list(self._labels)
        )
        usage.add_metric(list(self._labels.values()), 1 - free / pages if pages else 0.0)
        yield usage
        preempted = CounterMetricFamily("vllm:num_preemptions", MADE["vllm:num_preemptions"], None, list(self._labels))
        preempted.add_metric(list(self._labels.values()), 0)
        yield preempted
