"""Metrics under vLLM's names say what ours say."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cluster.routing.metrics import Metrics
from cluster.routing.vllm_metrics import MADE, SAME, VllmMetrics
from cluster.state.registry_types import NodeRecord
from paceline.request import FinishReason
from paceline.results import Completion, SpeculationStats, Timing, Usage


def exercised() -> Metrics:
    """Metrics of two requests: one is complete, one runs; a third waits."""
    metrics = Metrics()
    nodes = [
        NodeRecord("prefill-0", "prefill", 1, "h:1", free_pages=0, total_pages=100),
        NodeRecord("decode-0", "decode", 1, "h:2", free_pages=10, total_pages=40),
        NodeRecord("decode-1", "decode", 1, "h:3", free_pages=20, total_pages=60),
    ]
    metrics.registry.register(VllmMetrics(metrics, "tiny", lambda: nodes))
    for _ in range(2):
        metrics.request_started(0.03)
    metrics.set_queued(1)
    metrics.first_token(0.2)
    metrics.tokens(3, 0.3)
    stats = SpeculationStats(2, 8, 5, 2.5, (2, 1), (2, 2))
    completion = Completion(FinishReason.LENGTH, Usage(30, 7, 16), stats, Timing(0.2, 1.5))
    metrics.choice_ended(completion)
    metrics.request_ended("ok")
    return metrics


def test_every_series_says_what_ours_says() -> None:
    text = exercised().render().decode()
    found = {
        (sample.name, *sorted((label, value) for label, value in sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    model = (("engine", "0"), ("model_name", "tiny"))

    def value(name: str, *more: tuple[str, str]) -> float:
        return found[(f"vllm:{name}", *sorted((*model, *more)))]

    assert (value("num_requests_running"), value("num_requests_waiting")) == (1, 1)
    assert (value("prompt_tokens_total"), value("generation_tokens_total")) == (30, 4)
    assert (value("prefix_cache_queries_total"), value("prefix_cache_hits_total")) == (30, 16)
    assert value("request_success_total", ("finished_reason", "length")) == 1
    assert (value("time_to_first_token_seconds_count"), value("time_to_first_token_seconds_sum")) == (1, 0.2)
    assert value("time_to_first_token_seconds_bucket", ("le", "0.1")) == 0
    assert value("time_to_first_token_seconds_bucket", ("le", "0.2")) == 1
    assert value("inter_token_latency_seconds_count") == value("time_per_output_token_seconds_count") == 3
    assert value("e2e_request_latency_seconds_sum") == 1.5
    assert value("request_queue_time_seconds_count") == 2
    assert (value("request_prompt_tokens_sum"), value("request_generation_tokens_sum")) == (30, 7)
    assert value("request_generation_tokens_bucket", ("le", "10.0")) == 1
    assert value("request_generation_tokens_bucket", ("le", "5.0")) == 0
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert [value(f"spec_decode_{name}_total") for name in names] == [2, 8, 5]
    accepted = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(accepted, ("position", position)) for position in "01"] == [2, 1]
    assert value("kv_cache_usage_perc") == 1 - 30 / 100  # prefill nodes keep nothing for streams
    assert value("num_preemptions_total") == 0


def test_all_are_shown_and_only_where_they_are_asked_for() -> None:
    shown = {family.name for family in text_string_to_metric_families(exercised().render().decode())}
    assert {name for name in shown if name.startswith("vllm:")} == SAME.keys() | MADE.keys()
    assert "vllm:" not in Metrics().render().decode()


def test_no_decode_node() -> None:
    metrics = Metrics()
    metrics.registry.register(VllmMetrics(metrics, "tiny", list))
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0' in metrics.render().decode()
