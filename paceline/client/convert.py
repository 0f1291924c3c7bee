"""Between the SDK's plain data and the public messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from paceline.client.chats import CHAT_OPTIONS, ChatOptions, Messages, chat_to_proto
from paceline.client.formats import FORMAT_OPTIONS, ResponseFormat, grammar_of
from paceline.request import FinishReason
from paceline.results import (
    Choice,
    Chunk,
    Completion,
    Generation,
    HandoffBytes,
    JsonModel,
    ModelInfo,
    NodeInfo,
    ServedBy,
    SpeculationStats,
    Timing,
    Tokenization,
    Usage,
)
from paceline.v1 import common_pb2, inference_pb2
from paceline.wire import (
    finish_reason_from_proto,
    grammar_to_proto,
    logprobs_from_proto,
    round_from_proto,
    tool_call_from_proto,
    tool_call_part_from_proto,
)

Prompt = str | Sequence[int] | Messages


class GenerateOptions(ChatOptions, total=False):
    """Options of a generation. What is left out, or None, takes the server's default, which is the OpenAI API's.
    Those of ChatOptions are for chats. One of response_format, regex, choice and grammar is taken at a time.

    The text beside a type says what the option means; ``paceline generate --help`` shows the same.
    """

    max_tokens: Annotated[int | None, "Tokens to generate at most; 0: none. The server's default is 1,024."]
    min_tokens: Annotated[int | None, "Tokens before which no end-of-sequence or stop token is taken."]
    temperature: Annotated[float | None, "0 takes the most likely token; 1 is the model's own distribution."]
    top_p: Annotated[float | None, "Sample from the fewest tokens that have this probability together; 1 keeps all."]
    top_k: Annotated[int | None, "Sample from this many most likely tokens; 0 keeps all."]
    min_p: Annotated[float | None, "Drop tokens less likely than this share of the most likely one's probability."]
    presence_penalty: Annotated[float | None, "Subtracted from the logit of every token that was generated; -2 to 2."]
    frequency_penalty: Annotated[float | None, "Subtracted as often as the token was generated; -2 to 2."]
    repetition_penalty: Annotated[float | None, "Divides the logits of tokens of prompt and output; 1 is none."]
    logit_bias: Annotated[Mapping[int, float] | None, "Added to the logits of token ids, -100 to 100: ID=BIAS."]
    seed: Annotated[int | None, "The same request with the same seed gives the same text. Drawn when not given."]
    stop: Annotated[str | Sequence[str] | None, "Text that ends the answer and is not part of it; at most 16."]
    stop_token_ids: Annotated[Sequence[int] | None, "Token ids that end the answer."]
    include_stop_str_in_output: Annotated[bool | None, "The stop text that ends the answer is part of it."]
    bad_words: Annotated[Sequence[str] | None, "Texts that must not come, as the tokenizer writes them; at most 64."]
    skip_special_tokens: Annotated[bool | None, "Special tokens add nothing to the text; the default."]
    ignore_eos: Annotated[bool | None, "Go on after the model's end-of-sequence token."]
    top_logprobs: Annotated[int | None, "Log-probabilities of so many best tokens; 0: of the chosen token alone."]
    prompt_logprobs: Annotated[int | None, "As top_logprobs, of the prompt's tokens from the second one on."]
    response_format: Annotated[
        ResponseFormat | None, 'The answer is JSON: of a pydantic model or a JSON Schema, or any "json_object".'
    ]
    regex: Annotated[str | None, "The answer is a text that this regular expression matches as a whole."]
    choice: Annotated[Sequence[str] | None, "The answer is one of these texts."]
    grammar: Annotated[str | None, "The answer is a text of this context-free grammar: Lark, or GBNF."]
    n: Annotated[int | None, "Choices, each with a seed of its own derived from the request's; at most 128."]
    num_draft_tokens: Annotated[int | None, "Draft tokens on a path (K), at most the deployment's; 0 drafts nothing."]
    tree_width: Annotated[int | None, "Candidates per expanded node of the draft tree, at most the deployment's."]
    drafter: Annotated[str | None, "Who drafts: one of the deployment's drafters."]
    tree: Annotated[str | None, "Shape of the draft: chain, static or dynamic, as far as the deployment gives it."]
    prediction: Annotated[
        str | None, "What the answer will probably say: drafts are taken from it, the text stays the same."
    ]
    model: Annotated[str | None, "The model that is expected to be served; another one is refused."]
    request_id: Annotated[str | None, "Names the request in logs and traces; made by the router when not given."]
    truncate_prompt_tokens: Annotated[int | None, "Keep so many tokens of a longer prompt; -1: what the context holds."]
    truncation_side: Annotated[str | None, "Where a prompt is cut: left, the default, keeps its last tokens; or right."]
    tenant: Annotated[str | None, "Scope of the prefix cache and of the router's fairness."]
    priority: Annotated[int | None, "-10 to 10: among the tenant's requests that wait, the higher one goes first."]


_SPECULATION = ("num_draft_tokens", "tree_width", "drafter", "tree", "prediction")
_REQUEST = ("model", "request_id", "tenant", "priority", "truncate_prompt_tokens", "truncation_side")


def generate_request(prompt: Prompt, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """The request for ``prompt`` with ``options`` (GenerateOptions).

    TypeError on an unknown option or a value of the wrong type, ValueError on one that no field can hold.
    """
    given = _given(options, GenerateOptions)
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = (stop,)
    if isinstance(words := given.get("bad_words"), str):
        given["bad_words"] = (words,)
    request = {name: given.pop(name) for name in _REQUEST if name in given}
    speculation = {name: given.pop(name) for name in _SPECULATION if name in given}
    chat = {name: given.pop(name) for name in CHAT_OPTIONS if name in given}
    grammar = grammar_to_proto(grammar_of({name: given.pop(name) for name in FORMAT_OPTIONS if name in given}))
    message = inference_pb2.GenerateRequest(**request, sampling=common_pb2.SamplingParams(**given, grammar=grammar))
    if speculation:
        message.speculation.CopyFrom(common_pb2.Speculation(**speculation))
    _set_prompt(message, prompt, chat)
    return message


def parse_request(model: type[JsonModel], prompt: Prompt, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """The request for an answer that ``model`` reads. TypeError as ``generate_request``, and for a format besides."""
    if "response_format" in options:
        raise TypeError("response_format is the model that is parsed: it cannot be given besides")
    return generate_request(prompt, {**options, "response_format": model})


def _given(options: Mapping[str, Any], known: type[Any]) -> dict[str, Any]:
    """Those that are not None. TypeError on an unknown one."""
    names = known.__annotations__
    if unknown := options.keys() - names.keys():
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; known: {', '.join(names)}")
    return {name: value for name, value in options.items() if value is not None}


def _set_prompt(message: inference_pb2.GenerateRequest, prompt: Prompt, chat: Mapping[str, Any]) -> None:
    if not isinstance(prompt, str) and _is_chat(prompt):
        message.chat.CopyFrom(chat_to_proto(prompt, chat))  # type: ignore[arg-type]
    elif chat:
        raise TypeError(f"{next(iter(chat))} is for chats: give messages as the prompt")
    elif isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.CopyFrom(inference_pb2.TokenIds(ids=prompt))  # type: ignore[arg-type]


def _is_chat(prompt: Sequence[Any]) -> bool:
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def tokenize_request(prompt: str | Messages, options: Mapping[str, Any]) -> inference_pb2.TokenizeRequest:
    """The request to tokenize a text, or a chat with ``options`` (ChatOptions). TypeError as ``generate_request``."""
    given = _given(options, ChatOptions)
    if not isinstance(prompt, str):
        return inference_pb2.TokenizeRequest(chat=chat_to_proto(prompt, given))
    if given:
        raise TypeError(f"{next(iter(given))} is for chats: give messages as the prompt")
    return inference_pb2.TokenizeRequest(text=prompt)


def tokenization(message: inference_pb2.TokenizeResponse) -> Tokenization:
    """Tokens of a text or a chat."""
    return Tokenization(tuple(message.token_ids), message.max_model_len)


def chunk(message: inference_pb2.GenerateChunk) -> Chunk:
    """One step of a stream."""
    return Chunk(
        choice=message.choice,
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(logprobs_from_proto(entry) for entry in message.logprobs),
        round=round_from_proto(message.round) if message.HasField("round") else None,
        completion=completion(message.completion) if message.HasField("completion") else None,
        reasoning=message.reasoning,
        tool_calls=tuple(tool_call_part_from_proto(part) for part in message.tool_calls),
        prompt_logprobs=tuple(logprobs_from_proto(entry) for entry in message.prompt_logprobs),
    )


def completion(message: inference_pb2.Completion) -> Completion:
    """How one choice ended."""
    usage, spec, timing, handoff = message.usage, message.speculation, message.timing, message.handoff
    return Completion(
        finish_reason=finish_reason_from_proto(message.finish_reason) or FinishReason.ABORT,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens),
        speculation=SpeculationStats(
            rounds=spec.rounds,
            draft_tokens=spec.draft_tokens,
            accepted_tokens=spec.accepted_tokens,
            acceptance_length=spec.acceptance_length,
            accepted_per_position=tuple(spec.accepted_per_position),
            drafted_per_position=tuple(spec.drafted_per_position),
            accepted_per_round=tuple(spec.accepted_per_round),
            rounds_by_drafter=dict(spec.rounds_by_drafter),
            draft_s=spec.draft_s,
            verify_s=spec.verify_s,
            lossless=spec.lossless,
            predicted_tokens=spec.predicted_tokens,
            accepted_predicted_tokens=spec.accepted_predicted_tokens,
        ),
        timing=Timing(timing.ttft_s, timing.e2e_s, timing.decode_tokens_per_s),
        nodes=ServedBy(message.nodes.prefill, message.nodes.decode),
        handoff=HandoffBytes(handoff.target_kv, handoff.draft_kv, handoff.hidden, handoff.meta),
        seed=message.seed,
        request_id=message.request_id,
        stop_string=message.stop_string,
    )


def generation(message: inference_pb2.GenerateResponse) -> Generation:
    """A complete answer."""
    choices = tuple(
        Choice(
            index=choice.index,
            text=choice.text,
            token_ids=tuple(choice.token_ids),
            logprobs=tuple(logprobs_from_proto(entry) for entry in choice.logprobs),
            completion=completion(choice.completion),
            reasoning=choice.reasoning,
            tool_calls=tuple(tool_call_from_proto(call) for call in choice.tool_calls),
            prompt_logprobs=tuple(logprobs_from_proto(entry) for entry in choice.prompt_logprobs),
        )
        for choice in message.choices
    )
    return Generation(message.request_id, message.model, choices)


def model_info(message: inference_pb2.ModelInfoResponse) -> ModelInfo:
    """What is served and how."""
    nodes = tuple(
        NodeInfo(n.id, n.role, n.address, n.running, n.waiting, n.free_pages, n.total_pages) for n in message.nodes
    )
    return ModelInfo(
        model=message.model,
        dtype=message.dtype,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        drafter=message.drafter,
        num_draft_tokens=message.num_draft_tokens,
        bit_exact=message.bit_exact,
        drafters=tuple(message.drafters),
        tree=message.tree,
        acceptance=message.acceptance,
        nodes=nodes,
        system_fingerprint=message.system_fingerprint,
        weights=message.weights,
        kernels=message.kernels,
        aliases=tuple(message.aliases),
    )
