"""What must never be so in a `World`, and what must be so when all is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.handoff.state import HandoffState
from paceline.errors import PacelineError
from prefill_node.job import JobPhase

if TYPE_CHECKING:
    from tests.support.handoff_fuzz_link import FuzzLink
    from tests.support.handoff_world import World


def problems(world: World) -> list[str]:
    """What must never be so, at any moment."""
    found = list(world.faults)
    for stream in world.d_engine.streams.values():
        landing = stream.landing
        if landing is None or stream.seq is None:
            continue
        receiving = any(link.receiver.in_flight(stream.ticket) for link in world.links)
        if receiving and tuple(stream.seq.table.pages) != landing.pages:
            found.append(f"{stream.ticket}: its pages went while a link may write them")
    for link in world.links:
        found += [
            f"{ticket}: in flight, but its pages are nobody's"
            for ticket in link.receiver._in_flight.tickets
            if ticket not in world.d_engine.streams
        ]
        found += _released_sources(world, link)
    for runner, seqs in (
        (world.prefill, [job.seq for job in world.p_engine._jobs.values()]),
        (world.decode, [stream.seq for stream in world.d_engine.streams.values()]),
    ):
        owned = [ref for seq in seqs if seq is not None for ref in seq.table.pages]
        owned += runner.prefix.pages if runner.prefix else []
        found += runner.allocator.check_integrity(owned)
    return found


def problems_at_the_end(world: World) -> list[str]:
    """What must be so when all is over: every hand-off ended, both sides told once, every page back."""
    found = problems(world)
    for ticket, handoff in world.handoffs.items():
        if not handoff.terminal:
            found.append(f"{ticket} is still {handoff.status}")
        # The link tells of one that never began only when it refused the Begin; else the engine ended it itself.
        begun, told = HandoffState.SENDING in handoff.entered_at, world.told_decode[ticket]
        if told > 1 or (begun and told == 0):
            found.append(f"{ticket}: decode was told {told} times")
    found += [
        f"{ticket}: {count} hand-offs begun, {world.told_prefill[ticket]} ends told to prefill"
        for ticket, count in world.begun.items()
        if count != world.told_prefill[ticket]
    ]
    for asked in world.asked:
        ends = [e for e in asked.events.said if isinstance(e, PacelineError) or e.HasField("finished")]
        if len(ends) > 1 or (not ends and not asked.stream.left):
            found.append(f"{asked.stream.ticket}: its Decode caller heard {len(ends)} ends")
        for job, said in asked.attempts:
            count = sum(isinstance(e, PacelineError) or e.HasField("handed_off") for e in said)
            if count != 1:
                found.append(f"{job.ticket}: its Prefill caller heard {count} ends")
            if job.phase is not JobPhase.RELEASED and world.p_engine._jobs.get(job.ticket) is job:
                found.append(f"{job.ticket}: its job is still {job.phase}")
    for runner, held in ((world.prefill, world.p_engine._jobs), (world.decode, world.d_engine.streams)):
        cached = runner.prefix.num_pages if runner.prefix else 0
        found += [f"{name} still holds pages" for name in held]
        if runner.allocator.num_free + cached != runner.allocator.num_pages:
            found.append(f"{runner.allocator.num_free} of {runner.allocator.num_pages} pages came back")
        found += runner.problems()
    return found


def _released_sources(world: World, link: FuzzLink) -> list[str]:
    found = []
    for ticket, refs in link.refs.items():
        # Descriptors may outlive the ticket in the feeder's line; the sender takes no bytes of them then.
        if not all(world.prefill.allocator._current(ref) for ref in refs):
            found.append(f"{ticket}: source pages went while the link may read them")
    return found
