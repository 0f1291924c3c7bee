"""The router against scripted nodes: the life of a request."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.contract.generation import Chat, ChatMessage, GenerationRequest
from cluster.contract.plan import tokenize
from paceline.errors import (
    InvalidRequest,
)
from paceline.request import FinishReason, SpeculationParams, derive_seed
from paceline.results import HandoffBytes, Usage
from tests.support.byte_text import EOS
from tests.support.router_asks import PROMPT, TEXT, answer, ask, check_indexes, chunks
from tests.support.scripted_nodes import fleet, letters, token_at


async def test_first_token_from_prefill_rest_from_decode() -> None:
    async with fleet() as made:
        got = await chunks(made, ask())
        check_indexes(got)
        assert "".join(chunk.text for chunk in got) == TEXT[:10]
        assert [len(chunk.token_ids) for chunk in got] == [1, 3, 3, 3, 0]
        done = got[-1].completion
        assert done is not None
        assert done.finish_reason is FinishReason.LENGTH
        assert done.usage == Usage(5, 10, 0)
        assert done.handoff == HandoffBytes(1000, 100, 10, 1)
        assert (done.nodes.prefill, done.nodes.decode, done.seed) == ("prefill-0", "decode-0", 5)
        assert 0 < done.timing.ttft_s <= done.timing.e2e_s < 5
        assert done.timing.decode_tokens_per_s > 0
        stats = done.speculation
        assert (stats.rounds, stats.draft_tokens, stats.accepted_tokens) == (3, 12, 6)
        assert stats.acceptance_length == pytest.approx(3.0)  # 9 tokens of 3 rounds, the bonus counted
        assert stats.accepted_per_round == (2, 2, 2)
        assert (stats.drafted_per_position, stats.accepted_per_position) == ((3, 3, 3, 3), (3, 3, 0, 0))
        await made.idle()


async def test_time_to_first_token_does_not_wait_for_decode() -> None:
    async with fleet() as made:
        gate = made.nodes["decode-0"].script.gate = asyncio.Event()
        async with asyncio.timeout(5), aclosing(made.router.generate(ask())) as stream:
            assert (await anext(stream)).text == TEXT[0]
            gate.set()
            assert "".join([chunk.text async for chunk in stream]) == TEXT[1:10]


async def test_what_the_nodes_are_asked() -> None:
    async with fleet() as made:
        made.nodes["prefill-0"].script.cached_tokens = 3
        made.nodes["decode-0"].script.cached_tokens = 2
        request = replace(
            ask(stop=("zzz",), stop_token_ids=(7,), temperature=0.5),
            request_id="mine",
            tenant="t",
            speculation=SpeculationParams(2, None),
        )
        done = (await answer(made, request)).completion
        assert done.usage.cached_tokens == 3
        for node in made.nodes.values():
            (sequence,) = node.sequences
            assert sequence.request_id == "mine"
            assert sequence.prompt_token_ids == tuple(PROMPT.encode())
            assert sequence.cache_salt == "t"
            assert sequence.speculation == SpeculationParams(2, None)
            params = sequence.params
            assert (params.seed, params.temperature, params.stop, params.n) == (5, 0.5, (), 1)
            assert params.stop_token_ids == (7, EOS)
        assert made.nodes["prefill-0"].tickets == made.nodes["decode-0"].tickets


@pytest.mark.parametrize(
    ("request_", "text", "tokens", "reason"),
    [
        (ask(1), TEXT[:1], 1, FinishReason.LENGTH),
        (ask(tenant="eos 0"), "", 1, FinishReason.STOP),
        (ask(tenant="eos 4"), TEXT[:4], 5, FinishReason.STOP),
        (ask(stop_token_ids=(token_at(5, 5),)), "", 1, FinishReason.STOP),
        (ask(stop=(TEXT[0],)), "", 1, FinishReason.STOP),
        (ask(tenant="eos 4", ignore_eos=True), TEXT[:10], 10, FinishReason.LENGTH),
    ],
)
async def test_ends_at_the_first_token_and_at_stop_tokens(
    request_: GenerationRequest, text: str, tokens: int, reason: FinishReason
) -> None:
    async with fleet() as made:
        result = await answer(made, request_)
        assert (result.text, len(result.token_ids)) == (text, tokens)
        assert result.completion.finish_reason is reason
        assert result.completion.stop_string == "".join(request_.sampling.stop)
        assert result.completion.usage.completion_tokens == tokens
        await made.idle()
        assert (await answer(made, ask())).text == TEXT[:10]


@pytest.mark.parametrize("round_size", [1, 2, 3, 5, 20])
async def test_a_stop_string_ends_at_the_same_token_whatever_the_rounds(round_size: int) -> None:
    async with fleet() as made:
        made.nodes["decode-0"].script.round_size = round_size
        result = await answer(made, ask(30, stop=(TEXT[6:9], "nowhere"), top_logprobs=1))
        assert result.text == TEXT[:6]
        assert "".join(map(chr, result.token_ids)) == TEXT[:9]
        assert len(result.choices[0].logprobs) == 9
        done = result.completion
        assert done.finish_reason is FinishReason.STOP
        assert done.stop_string == TEXT[6:9]
        assert done.usage.completion_tokens == 9
        assert done.speculation.accepted_tokens + done.speculation.rounds == 8  # all but the first are of rounds
        await made.idle()


async def test_n_choices_have_their_own_seeds_and_tickets() -> None:
    async with fleet(decode=2) as made:
        result = await answer(made, ask(n=3))
        seeds = [derive_seed(5, i) for i in range(3)]
        assert [choice.completion.seed for choice in result.choices] == seeds
        assert [choice.text for choice in result.choices] == [letters(seed, 5, 10) for seed in seeds]
        assert len({choice.completion.request_id for choice in result.choices}) == 1
        decodes = [made.nodes[f"decode-{i}"] for i in range(2)]
        assert sorted(s.request_id.partition("#")[2] for n in decodes for s in n.sequences) == ["0", "1", "2"]
        tickets = [ticket for node in decodes for ticket in node.tickets]
        assert len(set(tickets)) == 3
        assert all(node.tickets for node in decodes)  # spread


async def test_a_drawn_seed_is_reported_and_gives_the_same_again() -> None:
    async with fleet() as made:
        first = await answer(made, ask(seed=None))
        second = await answer(made, ask(seed=None))
        assert first.completion.seed != second.completion.seed
        again = await answer(made, ask(seed=first.completion.seed))
        assert again.token_ids == first.token_ids


async def test_chat_goes_through_the_template() -> None:
    async with fleet() as made:
        result = await answer(made, ask(prompt=Chat((ChatMessage("user", "hi"),))))
        assert made.nodes["decode-0"].sequences[0].prompt_token_ids == tuple(b"<user>hi<assistant>")
        assert result.completion.usage.prompt_tokens == len("<user>hi<assistant>")


async def test_max_tokens_default_and_cap() -> None:
    async with fleet() as made:
        for max_tokens in (None, 10_000):
            result = await answer(made, ask(max_tokens))
            assert result.completion.usage.completion_tokens == 128 - 5
            assert result.completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "where"), [("x" * 128, "prompt"), (Chat((ChatMessage("user", "x" * 200),)), "messages")]
)
async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(
    prompt: str | Chat, where: str
) -> None:
    async with fleet() as made:
        with pytest.raises(InvalidRequest) as caught:
            await answer(made, ask(prompt=prompt))
        longest = made.router.served.max_model_len
        length = len(await tokenize(prompt, made.router.tokenizer))
        assert (caught.value.field, caught.value.code) == (where, "context_length_exceeded")
        assert caught.value.message.startswith(f"This model's maximum context length is {longest} tokens. However, ")
        assert f"you requested {length + 1} tokens ({length} in the {where}, " in caught.value.message
        (again,) = [pickle.loads(pickle.dumps(caught.value))]
        assert (again.code, str(again)) == (caught.value.code, str(caught.value))


async def test_a_hundred_and_twenty_eight_choices_within_the_bounds() -> None:
    async with fleet(max_inflight=128) as made:
        got = await answer(made, ask(2, n=128))
        assert [choice.index for choice in got.choices] == list(range(128))
        assert [choice.completion.seed for choice in got.choices] == [derive_seed(5, i) for i in range(128)]
        assert made.router.inflight == 0


async def test_more_choices_than_may_run_are_refused() -> None:
    """They could only run beyond the operator's bound."""
    async with fleet(max_inflight=3) as made:
        with pytest.raises(InvalidRequest, match="at most 3 sequences run here") as caught:
            await answer(made, ask(n=4))
        assert caught.value.field == "n"
        assert len((await answer(made, ask(n=3))).choices) == 3


BAD: list[tuple[str, GenerationRequest]] = [
    ("model", replace(ask(), model="other")),
    ("prompt", ask(prompt="")),
    ("prompt", ask(prompt=())),
    ("prompt", ask(prompt="x" * 128)),
    ("prompt", ask(prompt=(1, 2, 300))),
    ("prompt", ask(prompt=(-1,))),
    ("prompt", ask(prompt="\ud800")),
    ("messages", ask(prompt=Chat(()))),
    ("messages", ask(prompt=Chat((ChatMessage("robot", "x"),)))),
    ("messages[0].content", ask(prompt=Chat((ChatMessage("user", "\udc00"),)))),
    ("max_tokens", ask(-1)),
    ("max_tokens", ask(-1)),
    ("temperature", ask(temperature=float("nan"))),
    ("temperature", ask(temperature=-1.0)),
    ("top_p", ask(top_p=0.0)),
    ("top_p", ask(top_p=float("nan"))),
    ("top_k", ask(top_k=-5)),
    ("min_p", ask(min_p=2.0)),
    ("n", ask(n=0)),
    ("n", ask(n=129)),
    ("presence_penalty", ask(presence_penalty=3.0)),
    ("repetition_penalty", ask(repetition_penalty=0.0)),
    ("logit_bias", ask(logit_bias={300: 1.0})),
    ("stop", ask(stop=("",))),
    ("stop", ask(stop=("\ud800",))),
    ("stop_token_ids", ask(stop_token_ids=(300,))),
    ("min_tokens", ask(min_tokens=11)),
    ("min_tokens", ask(None, min_tokens=200)),
    ("top_logprobs", ask(top_logprobs=21)),
    ("seed", ask(seed=-1)),
    ("request_id", replace(ask(), request_id="x" * 257)),
    ("tenant", ask(tenant="x" * 257)),
    ("priority", replace(ask(), priority=11)),
    ("priority", replace(ask(), priority=-11)),
]


async def test_bad_input_names_its_field_and_harms_nothing() -> None:
    async with fleet() as made:
        for field, request in BAD:
            with pytest.raises(InvalidRequest) as caught:
                await answer(made, request)
            assert caught.value.field == field
        assert not any(node.sequences for node in made.nodes.values())
        assert (await answer(made, ask())).text == TEXT[:10]
        assert made.router.inflight == 0


async def test_metrics() -> None:
    async with fleet() as made:
        await answer(made, ask())
        with pytest.raises(InvalidRequest):
            await answer(made, ask(-1))
        rendered = made.router.metrics.render().decode()
        for line in (
            'paceline_requests_total{status="ok"} 1.0',
            'paceline_requests_total{status="InvalidRequest"} 1.0',
            "paceline_completion_tokens_total 10.0",
            "paceline_prompt_tokens_total 5.0",
            "paceline_spec_rounds_total 3.0",
            "paceline_spec_draft_tokens_total 12.0",
            "paceline_spec_accepted_tokens_total 6.0",
            'paceline_spec_accepted_per_position_total{position="2"} 3.0',
            'paceline_handoff_bytes_total{byte_class="target_kv"} 1000.0',
            "paceline_handoff_exposed_seconds_sum 0.001",
            "paceline_handoff_transfer_seconds_sum 0.01",
            "paceline_inter_token_seconds_count 9.0",
            "paceline_time_to_first_token_seconds_count 1.0",
            "paceline_requests_running 0.0",
        ):
            assert line in rendered
