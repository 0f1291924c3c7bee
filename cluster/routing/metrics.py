"""What the router counts, for Prometheus. Acceptance length counts the bonus token."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from paceline.results import Completion, HandoffBytes

CONTENT_TYPE = CONTENT_TYPE_LATEST

_TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_GAP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_HANDOFF_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_E2E_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
_LENGTHS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)


class Metrics:
    """One registry per deployment, so that two in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._before_render: list[Callable[[], None]] = []

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"paceline_{name}", text, buckets=buckets, registry=self.registry)

        self._requests = counter("requests", "Requests by how they ended.", "status")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished choices.")
        self._cached_tokens = counter("cached_prompt_tokens", "Of them, found in a prefix cache.")
        self._hint_tokens = counter("prefix_hint_tokens", "Tokens that a node was chosen for having cached.", "role")
        self._hit_tokens = counter("prefix_hit_tokens", "Tokens that it did have cached.", "role")
        self._bypassed = counter("bypassed", "Prompts so short that their decode node computed them.")
        self._output_tokens = counter("completion_tokens", "Tokens sent to clients.")
        self._retries = counter("retries", "Attempts that failed and were made again, by error.", "error")
        self._rounds = counter("spec_rounds", "Draft-verify rounds.")
        self._drafted = counter("spec_draft_tokens", "Draft tokens proposed.")
        self._accepted = counter("spec_accepted_tokens", "Draft tokens accepted.")
        self._rounds_of = counter("spec_rounds_by_drafter", "Rounds by who drafted.", "drafter")
        self._draft_s = counter("spec_draft_seconds", "Time in drafting, of the rounds that choices took part in.")
        self._verify_s = counter("spec_verify_seconds", "Time in verification, likewise.")
        self._lossy = counter("spec_lossy_choices", "Choices decoded under a lossy acceptance rule (typical).")
        self._drafted_at = counter("spec_drafted_per_position", "Rounds that drafted at a depth.", "position")
        self._accepted_at = counter("spec_accepted_per_position", "Rounds that accepted at a depth.", "position")
        self._handoff_bytes = counter("handoff_bytes", "Bytes handed over from prefill to decode.", "byte_class")
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token, per choice.", _TTFT_S)
        self._gap = histogram("inter_token_seconds", "Time per token after the first.", _GAP_S)
        self._e2e = histogram("request_seconds", "Arrival to the end of a choice.", _E2E_S)
        self._exposed = histogram(
            "handoff_exposed_seconds", "End of prefill compute to the acknowledgement.", _HANDOFF_S
        )
        self._transfer = histogram(
            "handoff_transfer_seconds", "Time in which bytes of a hand-off were being sent.", _HANDOFF_S
        )
        self._length = histogram("spec_acceptance_length", "Tokens per round of a choice, bonus counted.", _LENGTHS)
        self._queue_s = histogram("queue_seconds", "Wait for its turn of a request that got one.", _TTFT_S)
        self._running = Gauge("paceline_requests_running", "Requests that run.", registry=self.registry)
        self._queued = Gauge("paceline_requests_queued", "Requests that wait for their turn.", registry=self.registry)
        self._breakers = Gauge(
            "paceline_node_breaker",
            "Circuit breaker of a node: 0 closed, 0.5 half-open, 1 open.",
            ["node"],
            registry=self.registry,
        )
        self._nodes = Gauge("paceline_nodes", "Nodes under a live lease.", ["role"], registry=self.registry)

    def set_nodes(self, prefill: int, decode: int) -> None:
        """Nodes alive, by role."""
        self._nodes.labels("prefill").set(prefill)
        self._nodes.labels("decode").set(decode)

    def before_render(self, refresh: Callable[[], None]) -> None:
        """Have gauges set by ``refresh`` whenever they are read."""
        self._before_render.append(refresh)

    def set_breakers(self, states: Mapping[str, float]) -> None:
        """By node id: 0 closed, 0.5 half-open, 1 open; nodes that are not there are forgotten."""
        self._breakers.clear()
        for node_id, state in states.items():
            self._breakers.labels(node_id).set(state)

    def set_queued(self, requests: int) -> None:
        """Requests that wait for their turn."""
        self._queued.set(requests)

    def request_started(self, queued_s: float) -> None:
        """A request runs, after ``queued_s`` in the queue."""
        self._running.inc()
        self._queue_s.observe(queued_s)

    def request_ended(self, status: str) -> None:
        """A request that ran is over. status: ok, cancelled, or the error's class."""
        self._running.dec()
        self._requests.labels(status).inc()

    def request_refused(self, status: str) -> None:
        """A request is over and never ran."""
        self._requests.labels(status).inc()

    def first_token(self, seconds: float) -> None:
        """The first token of a choice is on its way."""
        self._ttft.observe(seconds)
        self._output_tokens.inc()

    def tokens(self, count: int, seconds: float) -> None:
        """``count`` more tokens of a choice, ``seconds`` after those before them."""
        self._output_tokens.inc(count)
        for _ in range(count):
            self._gap.observe(seconds / count)

    def prefix_hit(self, role: str, hinted_tokens: int, cached_tokens: int) -> None:
        """A node was chosen for what the index says of its prefix cache, and has said what it has."""
        self._hint_tokens.labels(role).inc(hinted_tokens)
        self._hit_tokens.labels(role).inc(cached_tokens)

    def bypassed(self) -> None:
        """A decode node computed a short prompt itself though there was a prefill node."""
        self._bypassed.inc()

    def retried(self, error: str) -> None:
        """An attempt failed with this class of error."""
        self._retries.labels(error).inc()

    def handed_off(self, handoff: HandoffBytes, exposed_s: float, transfer_s: float) -> None:
        """A hand-off is complete."""
        for name in ("target_kv", "draft_kv", "hidden", "meta"):
            self._handoff_bytes.labels(name).inc(getattr(handoff, name))
        self._exposed.observe(exposed_s)
        self._transfer.observe(transfer_s)

    def choice_ended(self, completion: Completion) -> None:
        """A choice is complete."""
        usage, spec = completion.usage, completion.speculation
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._e2e.observe(completion.timing.e2e_s)
        self._rounds.inc(spec.rounds)
        self._drafted.inc(spec.draft_tokens)
        self._accepted.inc(spec.accepted_tokens)
        for counts, metric in (
            (spec.drafted_per_position, self._drafted_at),
            (spec.accepted_per_position, self._accepted_at),
        ):
            for position, count in enumerate(counts, 1):
                metric.labels(str(position)).inc(count)
        for drafter, rounds in spec.rounds_by_drafter.items():
            self._rounds_of.labels(drafter).inc(rounds)
        self._draft_s.inc(spec.draft_s)
        self._verify_s.inc(spec.verify_s)
        self._lossy.inc(not spec.lossless)
        if spec.rounds:
            self._length.observe(spec.acceptance_length)

    def render(self) -> bytes:
        """The text exposition."""
        for refresh in self._before_render:
            refresh()
        return generate_latest(self.registry)
