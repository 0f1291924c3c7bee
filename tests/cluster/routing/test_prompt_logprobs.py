"""Log-probabilities of the prompt, and requests that generate nothing: told once, whichever nodes fail."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.contract.generation import GenerationRequest, ReceivedChoice, Resume
from cluster.contract.public_wire import plan_digest
from cluster.routing.choice import ChoiceRun
from paceline.errors import HandoffFailed, InvalidRequest, PacelineError
from paceline.request import FinishReason, SamplingParams, SequenceRequest, TokenLogprobs
from paceline.results import Chunk
from tests.support.byte_text import ByteDetokenizer, ByteTokenizer
from tests.support.router_asks import PROMPT, TEXT, answer, ask, check_indexes, chunks
from tests.support.scripted_nodes import Fleet, Script, fleet, prompt_logprobs_of

LONG = "a prompt of more than two messages"


def expected(prompt: str, top: int) -> tuple[TokenLogprobs, ...]:
    params = SamplingParams(prompt_logprobs=top)
    return tuple(prompt_logprobs_of(SequenceRequest("r", tuple(prompt.encode()), params)))


def told(got: list[Chunk], choice: int = 0) -> tuple[TokenLogprobs, ...]:
    """Those of a choice; all must come before its first token."""
    own = [chunk for chunk in got if chunk.choice == choice]
    with_tokens = [i for i, chunk in enumerate(own) if chunk.token_ids]
    with_prompt = [i for i, chunk in enumerate(own) if chunk.prompt_logprobs]
    assert max(with_prompt, default=-1) < min(with_tokens, default=len(own))
    return tuple(entry for chunk in own for entry in chunk.prompt_logprobs)


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("prefills", [0, 1])
async def test_they_come_before_the_first_token(prefills: int, top: int) -> None:
    async with fleet(prefill=prefills) as made:
        got = await chunks(made, ask(prompt=LONG, prompt_logprobs=top, n=2))
        for choice in (0, 1):
            check_indexes([chunk for chunk in got if chunk.choice == choice])
            assert told(got, choice) == expected(LONG, top)
        plain = await chunks(made, ask(prompt=LONG, n=2))
        assert told(plain) == ()
        assert [c.text for c in got if c.choice == 0 and c.text] == [c.text for c in plain if c.choice == 0 and c.text]
        done = await answer(made, ask(prompt=LONG, prompt_logprobs=top))
        assert done.choices[0].prompt_logprobs == expected(LONG, top)


async def test_only_the_node_that_computes_the_prompt_is_asked_for_them() -> None:
    """So a decode node may use its cache (vllm #50792)."""
    async with fleet() as made:
        await answer(made, ask(prompt=LONG, prompt_logprobs=1))
        assert [s.params.prompt_logprobs for s in made.nodes["decode-0"].sequences] == [None]
        assert [s.params.prompt_logprobs for s in made.nodes["prefill-0"].sequences] == [1]


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("max_tokens", [0, 1, 10])
@pytest.mark.parametrize("prefills", [1, 2])
async def test_a_prefill_node_dies_in_the_midst_of_them(at: int, max_tokens: int, prefills: int) -> None:
    """Each is told once; without another prefill node, decode tells the rest."""
    async with fleet(prefill=prefills) as made:
        for i in range(prefills):
            made.nodes[f"prefill-{i}"].script.die_in_prompt = at
        got = await chunks(made, ask(max_tokens, prompt=LONG, prompt_logprobs=1))
        assert told(got) == expected(LONG, 1)
        check_indexes(got)
        assert got[-1].completion is not None
        assert "".join(chunk.text for chunk in got) == "".join(
            [chunk.text for chunk in await chunks(made, ask(max_tokens, prompt=LONG))]
        )
        await made.idle()


async def test_a_node_that_dies_after_them_has_nobody_tell_them_again() -> None:
    async with fleet(decode=2) as made:
        for i in (0, 1):
            made.nodes[f"decode-{i}"].script.die_after = 3
        got = await chunks(made, ask(prompt=LONG, prompt_logprobs=1))
        assert told(got) == expected(LONG, 1)
        asked = [s.params.prompt_logprobs for s in made.nodes["prefill-0"].sequences]
        assert asked[0] == 1
        assert set(asked[1:]) == {None}


async def test_a_gap_is_a_failure_of_the_node() -> None:
    async with fleet() as made:
        made.nodes["prefill-0"].script.skip_in_prompt = 1
        assert told(await chunks(made, ask(prompt=LONG, prompt_logprobs=1))) == expected(LONG, 1)
        assert made.nodes["prefill-0"].script.skip_in_prompt is None


async def test_a_node_that_leaves_the_last_ones_out() -> None:
    async with fleet(prefill=0) as made:
        made.nodes["decode-0"].script.skip_in_prompt = len(LONG) // 2 - 1
        assert told(await chunks(made, ask(prompt=LONG, prompt_logprobs=1))) == expected(LONG, 1)
        assert len(made.nodes["decode-0"].sequences) == 2


# -- nothing is generated ------------------------------------------------------------------------------------------


async def ended(made: Fleet, request: GenerationRequest) -> list[Chunk]:
    got = await chunks(made, request)
    assert got[-1].completion is not None
    assert got[-1].completion.finish_reason is FinishReason.LENGTH
    assert got[-1].completion.usage.completion_tokens == 0
    assert not any(chunk.token_ids or chunk.text for chunk in got)
    await made.idle()
    return got


@pytest.mark.parametrize("prefills", [0, 1])
@pytest.mark.parametrize("tenant", ["", "eos 0"])
async def test_no_token_with_logprobs(prefills: int, tenant: str) -> None:
    """Also where the token that a node makes would end the sequence."""
    async with fleet(prefill=prefills) as made:
        got = await ended(made, ask(0, prompt=LONG, prompt_logprobs=1, tenant=tenant))
        assert told(got) == expected(LONG, 1)
        assert (made.nodes["decode-0"].sequences == []) is bool(prefills)  # nothing to decode
        completion = got[-1].completion
        assert completion is not None
        assert completion.nodes.decode == ("" if prefills else "decode-0")


async def test_no_token_and_no_logprobs_asks_no_node() -> None:
    async with fleet() as made:
        assert len(await ended(made, ask(0, prompt=LONG))) == 1
        assert made.nodes["prefill-0"].sequences == made.nodes["decode-0"].sequences == []


async def test_one_token_and_a_prompt_of_one_token() -> None:
    async with fleet() as made:
        done = await answer(made, ask(1, prompt=LONG, prompt_logprobs=0, top_logprobs=1))
        assert (len(done.token_ids), len(done.choices[0].logprobs)) == (1, 1)
        assert done.choices[0].prompt_logprobs == expected(LONG, 0)
        assert made.nodes["prefill-0"].alone == [True]
        done = await answer(made, ask(0, prompt="x", prompt_logprobs=5))
        assert done.choices[0].prompt_logprobs == ()
        assert len(made.nodes["prefill-0"].sequences) == 1
        assert made.nodes["decode-0"].sequences == []
        done = await answer(made, ask(1, prompt=PROMPT))  # as ever
        assert done.text == TEXT[:1]
        assert made.nodes["prefill-0"].alone == [True, False]


async def test_a_full_prefill_node_and_one_that_never_answers_right() -> None:
    async with fleet(prefill=1) as made:
        made.nodes["prefill-0"].script = Script(errors=[PacelineError("broken")] * 9)
        assert told(await ended(made, ask(0, prompt=LONG, prompt_logprobs=1))) == expected(LONG, 1)
        assert made.nodes["decode-0"].local == [True]


# -- resumed -------------------------------------------------------------------------------------------------------


def resuming(made: Fleet, received: ReceivedChoice, **sampling: Any) -> GenerationRequest:
    request = GenerationRequest(
        tuple(LONG.encode()), SamplingParams(seed=5, stop_token_ids=(256,), max_tokens=10, **sampling), 10, model="tiny"
    )
    digest = plan_digest(request)
    return GenerationRequest(
        request.prompt, request.sampling, 10, model="tiny", generation_id="g" * 22, resume=Resume(digest, (received,))
    )


@pytest.mark.parametrize("have", [0, 1, 5, len(LONG) - 1])
async def test_a_client_that_has_some_gets_the_rest(have: int) -> None:
    async with fleet() as made:
        request = resuming(made, ReceivedChoice(0, 0, (), False, have), prompt_logprobs=1)
        got = [entry for chunk in await chunks(made, request) for entry in chunk.prompt_logprobs]
        assert tuple(got) == expected(LONG, 1)[have:]


@pytest.mark.parametrize(
    ("received", "sampling"),
    [
        (ReceivedChoice(0, 0, (), False, len(LONG)), {"prompt_logprobs": 1}),
        (ReceivedChoice(0, 0, (), False, 1), {}),
        (ReceivedChoice(0, 1, (), False, 3), {"prompt_logprobs": 1}),
    ],
)
async def test_a_client_that_claims_what_cannot_be(received: ReceivedChoice, sampling: dict[str, Any]) -> None:
    async with fleet() as made:
        with pytest.raises(InvalidRequest, match=r"^resume.choices"):
            await chunks(made, resuming(made, received, **sampling))


# -- by index ------------------------------------------------------------------------------------------------------


def run_of(prompt: tuple[int, ...], top: int | None) -> ChoiceRun:
    params = SamplingParams(seed=1, max_tokens=4, prompt_logprobs=top)
    detokenizer = ByteDetokenizer(ByteTokenizer(), (), ())
    return ChoiceRun(0, "r", SequenceRequest("r", prompt, params), detokenizer, 0.0)


def test_entries_are_taken_once_by_their_place() -> None:
    entries = [TokenLogprobs(-float(i)) for i in range(1, 6)]
    run = run_of((1, 2, 3, 4, 5, 6), 0)
    first = run.take_prompt_logprobs(1, entries[:2])
    assert first is not None
    assert first.prompt_logprobs == tuple(entries[:2])
    assert run.take_prompt_logprobs(1, entries[:2]) is None
    with pytest.raises(HandoffFailed, match="token 4"):
        run.take_prompt_logprobs(4, entries[3:])
    with pytest.raises(HandoffFailed, match="before all"):
        run.take(0, [5], [], ())
    assert run.token_ids == []
    again = run.take_prompt_logprobs(1, [*entries, TokenLogprobs(-9.0)])  # one more than there are tokens
    assert again is not None
    assert again.prompt_logprobs == tuple(entries[2:])
    assert not run.wants_prompt_logprobs
    assert run.for_nodes().params.prompt_logprobs is None


def test_what_nobody_asked_for_is_not_told() -> None:
    assert run_of((1, 2, 3), None).take_prompt_logprobs(1, [TokenLogprobs(-1.0)]) is None
