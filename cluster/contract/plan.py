"""Turns what a client asks into what the nodes are asked: validated, tokenized, every default resolved."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cluster.contract.generation import (
    MAX_PRIORITY,
    MAX_STOP_TOKEN_IDS,
    Chat,
    GenerationRequest,
    Prompt,
    check_count,
    check_generation_id,
    check_name,
    check_unicode,
)
from cluster.contract.grammars import check_grammar
from cluster.contract.tools import (
    NO_STYLE,
    TAIL_TOKENS,
    AnswerStyle,
    Template,
    answer_format,
    answer_grammar,
    check_answer_format,
    check_tools,
    markers,
    template_messages,
    template_options,
)
from paceline.errors import InvalidRequest, PacelineError, quoted
from paceline.grammar.check import GrammarChecker
from paceline.parsing.answer import AnswerFormat
from paceline.request import (
    INT32_MAX,
    MAX_BAD_TOKENS,
    MAX_BAD_WORD,
    MAX_BAD_WORDS,
    DraftLimits,
    SamplingParams,
    SequenceRequest,
    SpeculationParams,
    derive_seed,
)

DEFAULT_MAX_TOKENS = 1024  # when the request names none and the context leaves as much
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's code of a prompt that is too long
TRUNCATION_SIDES = ("left", "right")
KEEP_WHAT_FITS = -1  # of a prompt that is too long
SEED_BITS = 53  # a drawn seed survives readers that keep numbers as doubles
THREAD_ABOVE_CHARS = 20_000  # longer texts are tokenized off the event loop
CHARS_PER_TURN = 40  # what a template adds to each message and call, about


class TokenizerLike(Protocol):
    """paceline.text.tokenizer.Tokenizer, as far as the router needs it."""

    @property
    def eos_token_ids(self) -> Collection[int]: ...

    strip_start: int  # leading spaces that a text loses, at most

    def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        """Token ids of ``text``, by default as a prompt has them."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """What a token adds to the text."""

    @property
    def template(self) -> Template: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = ...,
        *,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        native_tools: bool | None = ...,
        continue_final_message: bool = ...,
        values: Mapping[str, Any] | None = ...,
    ) -> Sequence[int]:
        """Token ids of a conversation: see paceline.text.tokenizer."""

    def special_ids(self, texts: Collection[str]) -> Mapping[str, int]:
        """Ids of those of ``texts`` that are special tokens."""


@dataclass(frozen=True)
class Plan:
    """A request ready for the nodes."""

    request_id: str
    admitted: GenerationRequest  # with every default resolved, the seed drawn: planned again it is the same plan
    stop: tuple[str, ...]  # the router's business: nodes do not see them
    sequences: tuple[SequenceRequest, ...]  # one per choice

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output at most, all choices together."""
        return sum(len(seq.prompt_token_ids) + seq.params.max_tokens for seq in self.sequences)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, which all choices share."""
        return len(self.sequences[0].prompt_token_ids)


@dataclass(frozen=True)
class ServedModel:
    """What is served: requests are checked against it."""

    model: str
    max_model_len: int
    vocab_size: int
    drafters: tuple[str, ...]  # what a request may name as its drafter, the deployment's own first
    drafts: DraftLimits
    style: AnswerStyle = NO_STYLE
    aliases: tuple[str, ...] = ()  # further names that requests may give the model


async def make_plan(
    request: GenerationRequest,
    served: ServedModel,
    tokenizer: TokenizerLike,
    grammars: GrammarChecker | None = None,
) -> Plan:
    """Raise InvalidRequest naming the first field that is wrong.

    grammars: checks a grammar before a node is asked, off the event loop; None leaves that to the nodes. Raises
    Overloaded where it cannot in time.
    """
    asked = request
    _check_names(request, served)
    prompt = truncated(await tokenize(request.prompt, tokenizer, served.style), request, served.max_model_len)
    check_prompt(prompt, request.prompt, served.max_model_len, served.vocab_size)
    _check_speculation(request.speculation, served)
    request = replace(request, speculation=await _with_prediction(request.speculation, tokenizer, served))
    request, form = _with_answer(request, prompt, served.style, tokenizer)
    params = _resolve(_with_bad_sequences(request, tokenizer), served, len(prompt), tokenizer.eos_token_ids)
    if params.grammar is not None and grammars is not None:
        await check_grammar(grammars, params.grammar, asked)
    request_id = request.request_id or f"req-{uuid.uuid4().hex}"
    seed = params.seed if params.seed is not None else secrets.randbits(SEED_BITS)
    sequences = tuple(
        SequenceRequest(
            request_id=request_id if params.n == 1 else f"{request_id}#{i}",
            prompt_token_ids=prompt,
            params=replace(params, seed=derive_seed(seed, i), stop=(), n=1),
            speculation=request.speculation,
            cache_salt=request.cache_salt or request.tenant,
        )
        for i in range(params.n)
    )
    admitted = GenerationRequest(
        prompt=prompt,
        sampling=replace(params, seed=seed),
        max_tokens=params.max_tokens,
        speculation=request.speculation,
        model=served.model,
        request_id=request_id,
        tenant=request.tenant,
        priority=request.priority,
        answer_format=form,
    )
    return Plan(request_id, admitted, params.stop, sequences)


def truncated(prompt: tuple[int, ...], request: GenerationRequest, max_model_len: int) -> tuple[int, ...]:
    """The part of a prompt that the request wants to keep. Raises InvalidRequest."""
    most, side = request.truncate_prompt_tokens, request.truncation_side or "left"
    if side not in TRUNCATION_SIDES:
        raise InvalidRequest("truncation_side", f"must be {' or '.join(TRUNCATION_SIDES)}, got {quoted(side)}")
    if most is None:
        return prompt
    if not (most == KEEP_WHAT_FITS or 1 <= most <= INT32_MAX):
        raise InvalidRequest("truncate_prompt_tokens", f"must be -1 or at least 1, got {most}")
    if most == KEEP_WHAT_FITS:
        most = max_model_len - max(1, request.max_tokens or 1)
        if most < 1:
            raise InvalidRequest(
                "max_tokens", f"{request.max_tokens} of {max_model_len} leave no room for a prompt to keep"
            )
    return prompt[-most:] if side == "left" else prompt[:most]


def _with_answer(
    request: GenerationRequest, prompt: tuple[int, ...], style: AnswerStyle, tokenizer: TokenizerLike
) -> tuple[GenerationRequest, AnswerFormat | None]:
    """The request with the grammar that its tools ask for, and how its answer is read."""
    chat, form = request.prompt, request.answer_format
    if not isinstance(chat, Chat):
        if form is not None:
            check_answer_format(form)
        return request, form
    if form is not None:
        raise InvalidRequest("answer_format", "only goes with token_ids: the router makes it of a chat")
    end = tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False) if style.reasoning else ""
    form = answer_format(chat, style, end)
    if form is None:
        return request, None
    specials = tokenizer.special_ids(markers(form))
    grammar = answer_grammar(chat, form, request.sampling.grammar, specials)
    return replace(request, sampling=replace(request.sampling, grammar=grammar)), form


def _with_bad_sequences(request: GenerationRequest, tokenizer: TokenizerLike) -> GenerationRequest:
    """The request with the tokens of its bad words, as vLLM takes them: of each word, and of the word after a space
    where that changes its first token alone. Raises InvalidRequest."""
    asked = request.sampling
    check_count("bad_words", len(asked.bad_words), MAX_BAD_WORDS)
    sequences = list(asked.bad_token_ids)
    for i, word in enumerate(asked.bad_words):
        check_unicode(f"bad_words[{i}]", word)
        if not word.strip() or len(word) > MAX_BAD_WORD:
            raise InvalidRequest(f"bad_words[{i}]", f"needs 1 to {MAX_BAD_WORD} characters that are not all spaces")
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        if not 0 < len(plain) <= MAX_BAD_TOKENS:
            raise InvalidRequest(f"bad_words[{i}]", f"has {len(plain)} tokens, 1 to {MAX_BAD_TOKENS} are taken")
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    kept = tuple(dict.fromkeys(sequences))
    return replace(request, sampling=replace(asked, bad_words=(), bad_token_ids=kept))


def _check_speculation(asked: SpeculationParams, served: ServedModel) -> None:
    asked.check_within(served.drafts)
    if asked.num_draft_tokens and served.drafters == ("none",):
        raise InvalidRequest(
            "speculation.num_draft_tokens",
            f"must be 0, since this deployment serves without a drafter; got {asked.num_draft_tokens}",
        )
    if asked.drafter is not None and asked.drafter not in served.drafters:
        known = ", ".join(served.drafters)
        raise InvalidRequest("speculation.drafter", f"{quoted(asked.drafter)} is none of this deployment's: {known}")


async def _with_prediction(
    asked: SpeculationParams, tokenizer: TokenizerLike, served: ServedModel
) -> SpeculationParams:
    """``asked`` with the tokens of its prediction in place of the text. Raises InvalidRequest."""
    where, ids = "prediction", asked.prediction_token_ids
    if asked.prediction:
        if ids:
            raise InvalidRequest("speculation.prediction", "and prediction_token_ids exclude each other")
        ids = await _encode(where, asked.prediction, tokenizer, special=False)
    if len(ids) > served.max_model_len:
        raise InvalidRequest(where, f"has {len(ids)} tokens, at most {served.max_model_len} fit into the context")
    for token_id in ids:
        if not 0 <= token_id < served.vocab_size:
            raise InvalidRequest(where, f"token id {token_id} is outside the vocabulary of {served.vocab_size}")
    return replace(asked, prediction="", prediction_token_ids=ids)


async def _encode(where: str, text: str, tokenizer: TokenizerLike, *, special: bool) -> tuple[int, ...]:
    """Token ids of a text, made off the event loop where it is long. special: with those that begin a prompt."""
    check_unicode(where, text)
    if len(text) > THREAD_ABOVE_CHARS:
        return tuple(await asyncio.to_thread(tokenizer.encode, text, special))
    return tuple(tokenizer.encode(text, special))


async def tokenize(prompt: Prompt, tokenizer: TokenizerLike, style: AnswerStyle = NO_STYLE) -> tuple[int, ...]:
    """Token ids of a prompt. InvalidRequest when it cannot be tokenized."""
    if isinstance(prompt, tuple):
        return prompt
    if isinstance(prompt, Chat):
        return await _tokenize_chat(prompt, tokenizer, style)
    if not prompt:
        raise InvalidRequest("prompt", "must not be empty")
    return await _encode("prompt", prompt, tokenizer, special=True)


async def _tokenize_chat(chat: Chat, tokenizer: TokenizerLike, style: AnswerStyle) -> tuple[int, ...]:
    if not chat.messages:
        raise InvalidRequest("messages", "must not be empty")

    def tokens() -> tuple[int, ...]:
        _check_chat(chat, style)
        return tuple(tokenizer.apply_chat_template(template_messages(chat), **template_options(chat, style)))

    try:
        return await asyncio.to_thread(tokens) if _size(chat) > THREAD_ABOVE_CHARS else tokens()
    except PacelineError:
        raise
    except Exception as error:  # a template may raise what it likes about the roles it is given
        raise InvalidRequest("messages", f"the chat template refuses them: {error}") from None


def _check_chat(chat: Chat, style: AnswerStyle) -> None:
    for i, message in enumerate(chat.messages):
        check_unicode(f"messages[{i}].content", message.content)
        check_unicode(f"messages[{i}].role", message.role)
        if not message.role:
            raise InvalidRequest(f"messages[{i}].role", "must not be empty")
    check_tools(chat, style)


def _size(chat: Chat) -> int:
    """Characters to look at, about."""
    size = len(chat.template_values) + sum(len(tool.description) + len(tool.parameters) for tool in chat.tools)
    for message in chat.messages:
        size += len(message.content) + len(message.reasoning) + CHARS_PER_TURN
        size += sum(len(call.arguments) + CHARS_PER_TURN for call in message.tool_calls)
    return size


def _check_names(request: GenerationRequest, served: ServedModel) -> None:
    if request.model and request.model not in (served.model, *served.aliases):
        raise InvalidRequest("model", f"{quoted(request.model)} is not served here, {served.model!r} is")
    check_name("request_id", request.request_id)
    check_name("tenant", request.tenant)
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise InvalidRequest("priority", f"must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    check_generation_id(request.generation_id)


def check_prompt(prompt: tuple[int, ...], given: Prompt, max_model_len: int, vocab_size: int) -> None:
    """Raise InvalidRequest unless the model can take the tokens ``prompt``, which were ``given`` in some form."""
    where = "messages" if isinstance(given, Chat) else "prompt"
    if not prompt:
        raise InvalidRequest(where, "must not be empty")
    if len(prompt) + 1 > max_model_len:  # clients look for these words, which are OpenAI's
        limit = f"This model's maximum context length is {max_model_len} tokens"
        asked = f"you requested {len(prompt) + 1} tokens ({len(prompt)} in the {where}, at least 1 for the completion)"
        raise InvalidRequest(
            where, f"{limit}. However, {asked}. Please reduce the length of the {where}.", CONTEXT_LENGTH_EXCEEDED
        )
    for token_id in prompt:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(where, f"token id {token_id} is outside the vocabulary of {vocab_size}")


def _resolve(
    request: GenerationRequest, served: ServedModel, num_prompt: int, eos_token_ids: Collection[int]
) -> SamplingParams:
    """Every default filled in, max_tokens within the context, the model's end tokens among the stop tokens."""
    asked, room = request.sampling, served.max_model_len - num_prompt
    if request.max_tokens is None:
        max_tokens = min(room, max(DEFAULT_MAX_TOKENS, asked.min_tokens))
    else:
        max_tokens = request.max_tokens
    distinct = tuple(dict.fromkeys(asked.stop_token_ids))
    # The model's own do not count: a request that is planned again has them too.
    check_count("stop_token_ids", sum(i not in eos_token_ids for i in distinct), MAX_STOP_TOKEN_IDS)
    asked = replace(asked, stop_token_ids=distinct)
    replace(asked, max_tokens=max_tokens).validate(served.vocab_size)
    for text in asked.stop:
        check_unicode("stop", text)
    # An answer under a grammar ends where nothing may follow, even one that ignores the end.
    unending = asked.ignore_eos and asked.grammar is None
    stop_ids = asked.stop_token_ids if unending else (*asked.stop_token_ids, *eos_token_ids)
    resolved = replace(
        asked,
        max_tokens=min(max_tokens, room),
        min_tokens=min(asked.min_tokens, max_tokens, room),
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
    )
    resolved.validate(served.vocab_size)  # what the model itself adds may leave no token that does not stop
    return resolved
