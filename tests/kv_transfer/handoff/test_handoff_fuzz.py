"""Hand-offs in random order: requests, chunks, answers, aborts from either side, clients that leave, deadlines, broken
links, missing rows, each at any moment. Every hand-off ends, both sides hear of it once, every page comes back.

``PACELINE_FUZZ=10000`` runs that many sequences; without it a number that takes some 10 s on a free core.
``PACELINE_FUZZ_SEED`` draws other sequences. The seed is printed.
"""

from __future__ import annotations

import os
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kv_transfer.handoff.state import HandoffState
from tests.support.handoff_rules import problems, problems_at_the_end
from tests.support.handoff_world import ANSWER_S, HANDOFF_S, World

SEQUENCES = int(os.environ.get("PACELINE_FUZZ", "100"))
SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "0"))
STEPS = 40
LITTLE = st.integers(0, 5)
TURNS = st.sampled_from(("feed", "send", "deliver", "receive", "ack"))
EVENTS = (
    "leave decode",
    "leave prefill",
    "lose prefill",
    "lose decode",
    "late",
    "steps",
    "steps",
    "ack",
    "ack",
    "stale",
)
FAULTS = st.sampled_from(("", "", "draft", "draft", "draft", "draft row", "hidden", "target"))
seen: Counter[str] = Counter()  # what the sequences reached


class Handoffs(RuleBasedStateMachine):
    """One world; every rule is a step of one thread, or an event from outside."""

    world: World

    @initialize(mode=st.sampled_from(("draft_kv", "hidden_states")), cache=st.booleans())
    def start(self, mode: str, cache: bool) -> None:
        torch.set_num_threads(1)
        self.world = World(mode, cache)
        self.ask(9, 3, False, False)

    @rule(num_prompt=st.integers(1, 20), max_tokens=st.integers(1, 5), local=st.booleans(), same=st.booleans())
    def ask(self, num_prompt: int, max_tokens: int, local: bool, same: bool) -> None:
        if len(self.world.asked) < 6:
            self.world.ask(num_prompt, max_tokens, local and num_prompt % 3 == 0, same)
            self.world.d_step()

    @rule(num_prompt=st.integers(1, 20), fault=FAULTS, rounds=st.integers(0, 10))
    def serve(self, num_prompt: int, fault: str, rounds: int) -> None:
        """A request and its prefill, some way along."""
        if len(self.world.asked) < 6:
            self.world.ask(num_prompt, 4, False, False)
        self.world.d_step()
        self.world.attempt(len(self.world.asked), fault, False)
        self.world.pump(rounds)

    @rule(number=LITTLE, fault=FAULTS, new=st.booleans())
    def prefill(self, number: int, fault: str, new: bool) -> None:
        self.world.attempt(number, fault, new)
        self.world.p_step()

    @rule(rounds=st.integers(1, 12))
    def everybody(self, rounds: int) -> None:
        self.world.pump(rounds)

    @rule(what=TURNS, number=LITTLE)
    def turn(self, what: str, number: int) -> None:
        self.world.turn(what, number)

    @rule(what=st.sampled_from(("feed", "send", "receive")), number=LITTLE, event=st.sampled_from(EVENTS), other=LITTLE)
    def turn_with_an_event_in_its_midst(self, what: str, number: int, event: str, other: int) -> None:
        self.world.during = lambda: self._event(event, other)
        self.world.turn(what, number)
        self.world.during = None

    @rule(turns=st.lists(st.tuples(TURNS, LITTLE), max_size=6), event=st.sampled_from(EVENTS), number=LITTLE)
    def forward_with_turns_in_its_midst(self, turns: list[tuple[str, int]], event: str, number: int) -> None:
        """After some layer of a forward: groups leave, and anything may become of their hand-off."""

        def during() -> None:
            for what, link in turns:
                self.world.turn(what, link)
            self._event(event, number)

        self.world.during = during
        self.world.p_step()
        self.world.during = None

    @rule(event=st.sampled_from(EVENTS), number=LITTLE)
    def event(self, event: str, number: int) -> None:
        self._event(event, number)

    @rule(prefill=st.booleans())
    def engine_step(self, prefill: bool) -> None:
        _ = self.world.p_step() if prefill else self.world.d_step()

    @rule(number=LITTLE, begin=st.booleans(), ticket=LITTLE)
    def another_link_names_it(self, number: int, begin: bool, ticket: int) -> None:
        self.world.foreign(number, begin, ticket)

    @rule(seconds=st.sampled_from((0.1, 0.2, 0.5, 1.0, HANDOFF_S + 0.5, ANSWER_S + 0.5)))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "world"):
            assert problems(self.world) == []

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.finish()
            assert problems_at_the_end(self.world) == []
            _count(self.world)
        finally:
            self.world.close()

    def _event(self, event: str, number: int) -> None:
        world = self.world
        match event:
            case "leave decode":
                world.leave_decode(number)
                _ = number % 2 and world.d_step()
            case "leave prefill":
                world.leave_prefill(number)
                _ = number % 2 and world.p_step()
            case "lose prefill" | "lose decode":
                world.lose(number, event.removeprefix("lose "))
            case "late":
                world.advance(HANDOFF_S + 0.5)
            case "steps":
                world.p_step()
                world.d_step()
            case "ack":
                world.turn("ack", number)
            case "stale":
                world.stale_ack(number % 3, ("ready", "failed", "cancelled")[number % 3], number)


def _count(world: World) -> None:
    for handoff in world.handoffs.values():
        seen[handoff.status] += 1
        if handoff.status is HandoffState.FAILED:
            last = max(handoff.entered_at, key=lambda state: (handoff.entered_at[state], state == HandoffState.FAILED))
            assert last is HandoffState.FAILED
            seen["failed while sending"] += HandoffState.SENDING in handoff.entered_at
    seen["without draft state"] += world.d_engine.missing_drafts
    seen["sequences"] += 1


def test_any_order_of_events_ends_every_hand_off() -> None:
    print(f"seed {SEED}, {SEQUENCES} sequences of up to {STEPS} steps")
    seen.clear()
    machine = seed(SEED)(Handoffs)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=SEQUENCES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(seen))
    # The sequences reach what they are for: whole hand-offs, failed ones before and while rows cross, missing drafts.
    assert seen["sequences"] >= SEQUENCES
    for what in (HandoffState.RELEASED, HandoffState.FAILED, "failed while sending", "without draft state"):
        assert seen[what] >= SEQUENCES // 20, what
