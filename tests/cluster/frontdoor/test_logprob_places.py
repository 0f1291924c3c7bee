"""Log-probabilities of tokens that split characters: exact bytes, offsets within the text, however tokens are grouped.

Tokens go the router's own way: a choice with the real detokenizer, whose chunks an answer takes whole and as a stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.contract.plan import Plan
from cluster.frontdoor.openai_logprobs import best_of
from cluster.frontdoor.openai_parse import ApiRequest, parse_chat, parse_completion
from cluster.frontdoor.openai_stream import Answer
from cluster.routing.choice import ChoiceRun
from paceline.request import FinishReason, SamplingParams, SequenceRequest, TokenLogprobs
from paceline.results import Chunk, Round
from paceline.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.support.http_app import CHAT, COMPLETION
from tests.support.tiny_tokenizers import QUICK, byte_fallback, byte_ids, byte_level

LEVEL, FALLBACK = Tokenizer(byte_level(), {}), Tokenizer(byte_fallback(), {})
TEXTS = st.text(st.sampled_from("aé日🦊 \ufffd\u0301b"), max_size=12)


def tokens_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens: whole words, parts of characters in any order, special ones."""
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=16)


def chunks(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], sizes: Sequence[int], stop: Sequence[str] = ()
) -> list[Chunk]:
    """The chunks of a choice whose tokens come in groups of ``sizes``, the last group the rest."""
    sequence = SequenceRequest("id", tuple(prompt), SamplingParams(max_tokens=len(ids) + 1))
    run = ChoiceRun(0, "id", sequence, IncrementalDetokenizer(tokenizer, prompt, stop), time.monotonic())
    ends = [0]
    for size in sizes:
        ends.append(min(ends[-1] + size, len(ids)))
    made = []
    for begin, end in pairwise([*ends, len(ids)]):
        entries = [TokenLogprobs(-1.0, (token_id, 3), (-1.0, -2.0)) for token_id in ids[begin:end]]
        left = end > begin and not run.finish_reason
        chunk = run.take(begin, ids[begin:end], entries, [Round(1, 0)]) if left else None
        if chunk is not None:
            made.append(chunk)
    run.end(FinishReason.LENGTH)
    return [*made, run.complete()]


def answer(request: ApiRequest, tokenizer: Tokenizer, prompt: Sequence[int]) -> Answer:
    """An answer whose prompt is known."""
    made = Answer(request, "m", tokenizer)
    sampling = request.generation.sampling
    sequence = SequenceRequest("id", tuple(prompt), sampling)
    made.planned(0, Plan("id", request.generation, sampling.stop, (sequence,)))
    return made


def whole(request: ApiRequest, tokenizer: Tokenizer, prompt: Sequence[int], parts: Sequence[Chunk]) -> dict[str, Any]:
    """The choice of a complete answer."""
    made = answer(request, tokenizer, prompt)
    for chunk in parts:
        made.take(chunk)
    choice: dict[str, Any] = made.body()["choices"][0]
    return choice


def streamed(
    request: ApiRequest, tokenizer: Tokenizer, prompt: Sequence[int], parts: Sequence[Chunk]
) -> list[dict[str, Any]]:
    """The choices of a stream's events."""
    made = answer(request, tokenizer, prompt)
    return [choice for chunk in parts for event in made.events(chunk) for choice in event["choices"]]


COMPLETE = parse_completion({**COMPLETION, "logprobs": 2}, "id")
STREAM = parse_completion({**COMPLETION, "logprobs": 2, "stream": True}, "id")
TALK = parse_chat({**CHAT, "logprobs": True, "top_logprobs": 2}, "id")
TALK_STREAM = parse_chat({**CHAT, "logprobs": True, "top_logprobs": 2, "stream": True}, "id")


@pytest.mark.parametrize("tokenizer", [LEVEL, FALLBACK])
@QUICK
@given(data=st.data(), sizes=st.lists(st.integers(1, 4), max_size=8))
def test_bytes_joined_are_the_text(tokenizer: Tokenizer, data: st.DataObject, sizes: list[int]) -> None:
    """The prompt may end in the midst of a character, or be special tokens alone, behind which a space is dropped."""
    prompt = data.draw(tokens_of(tokenizer).filter(bool))
    ids = data.draw(tokens_of(tokenizer))
    parts = chunks(tokenizer, prompt, ids, sizes)
    message = whole(TALK, tokenizer, prompt, parts)
    content, text = message["logprobs"]["content"], message["message"]["content"]
    joined = b"".join(bytes(item["bytes"]) for item in content)
    if any(tokenizer.token_bytes(token_id, True) for token_id in ids):
        assert joined.decode("utf-8", "replace") == text
    assert len(content) == len(ids)
    for item in content:
        assert item["top_logprobs"][0]["bytes"] == item["bytes"]  # the chosen token among its alternatives
        assert bytes(item["bytes"]).decode("utf-8", "replace") == item["token"]
    told = [choice["logprobs"] for choice in streamed(TALK_STREAM, tokenizer, prompt, parts) if choice["logprobs"]]
    assert [item for logprobs in told for item in logprobs["content"]] == content


@QUICK
@given(text=TEXTS, more=st.lists(st.integers(1, 4), max_size=8))
def test_bytes_of_valid_text_are_its_own(text: str, more: list[int]) -> None:
    ids = LEVEL.encode(text)
    prompt = LEVEL.encode("a")
    content = whole(TALK, LEVEL, prompt, chunks(LEVEL, prompt, ids, more))["logprobs"]["content"]
    assert b"".join(bytes(item["bytes"]) for item in content) == text.encode()


@pytest.mark.parametrize("tokenizer", [LEVEL, FALLBACK])
@QUICK
@given(data=st.data(), sizes=st.lists(st.integers(1, 4), max_size=8), stop=st.sampled_from([(), ("a",), ("é", " b")]))
def test_offsets_are_within_the_text(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int], stop: tuple[str, ...]
) -> None:
    prompt = data.draw(tokens_of(tokenizer).filter(bool))
    ids = data.draw(tokens_of(tokenizer))
    parts = chunks(tokenizer, prompt, ids, sizes, stop)
    made = whole(COMPLETE, tokenizer, prompt, parts)
    offsets, tokens = made["logprobs"]["text_offset"], made["logprobs"]["tokens"]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(made["text"]) for offset in offsets)
    for offset, token in zip(offsets, tokens, strict=True):
        if "\ufffd" not in token:  # it begins no character and ends none: its text is there, as far as there is text
            rest = made["text"][offset : offset + len(token)]
            assert token.startswith(rest)
    events = streamed(STREAM, tokenizer, prompt, parts)
    told = [choice["logprobs"] for choice in events if choice["logprobs"]]
    assert {name: [item for part in told for item in part[name]] for name in made["logprobs"]} == made["logprobs"]
    sent = 0
    for choice in events:  # what is told of a token was sure then
        sent += len(choice["text"])
        assert all(offset <= sent for offset in (choice["logprobs"] or {"text_offset": []})["text_offset"])


def test_parts_of_a_character_share_its_place() -> None:
    ids = LEVEL.encode("a日b")
    logprobs = whole(COMPLETE, LEVEL, LEVEL.encode("a"), chunks(LEVEL, LEVEL.encode("a"), ids, []))["logprobs"]
    parts = [LEVEL.token_bytes(token_id) for token_id in ids]
    assert b"".join(parts) == "a日b".encode()
    assert len(ids) > 3
    assert logprobs["text_offset"] == [0] + [1] * (len(ids) - 2) + [2]


def test_special_tokens_add_nothing() -> None:
    end = LEVEL.encode("</s>")[0]
    ids = [*LEVEL.encode("a"), end]
    content = whole(TALK, LEVEL, [end], chunks(LEVEL, [end], ids, []))["logprobs"]["content"]
    assert [(item["token"], item["bytes"]) for item in content] == [("a", [97]), ("", [])]


def test_a_stop_string_cuts_offsets_in_whole_answers_and_streams_alike() -> None:
    """Tokens within a stop string are told with the end, when it is known where the text ended."""
    ids = [byte_ids()[byte] for byte in b"xy ab"]
    prompt = LEVEL.encode("a")
    parts = chunks(LEVEL, prompt, ids, [1, 1, 1, 1], (" ab",))
    made = whole(COMPLETE, LEVEL, prompt, parts)
    assert (made["text"], made["logprobs"]["text_offset"]) == ("xy", [0, 1, 2, 2, 2])
    events = streamed(STREAM, LEVEL, prompt, parts)
    told = [(choice["text"], (choice["logprobs"] or {}).get("text_offset")) for choice in events]
    assert told == [("x", [0]), ("y", [1]), ("", [2]), ("", [2, 2])]


def test_a_space_that_a_text_loses_is_in_no_token() -> None:
    """Behind special tokens alone, the text of a SentencePiece model loses the space that its first word has."""
    vocabulary = byte_fallback().get_vocab()
    begin, the, a = [vocabulary["<s>"]], vocabulary["▁the"], vocabulary["a"]
    for ids, text, data in (([the, a, the], "thea the", [b"the", b"a", b" the"]), ([a, the], "a the", [b"a", b" the"])):
        message = whole(TALK, FALLBACK, begin, chunks(FALLBACK, begin, ids, []))
        assert message["message"]["content"] == text
        assert [bytes(item["bytes"]) for item in message["logprobs"]["content"]] == data


def test_the_token_that_is_there_comes_first() -> None:
    """As in vLLM. Mutants: the likeliest comes first, or the worse of two that read the same is kept."""
    entry = TokenLogprobs(-3.0, (7, 8), (-0.5, -1.0))
    assert list(best_of("own", entry, ["a", "b"]).items()) == [("own", -3.0), ("a", -0.5), ("b", -1.0)]
    assert best_of("b", entry, ["b", "b"]) == {"b": -0.5}
