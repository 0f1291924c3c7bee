"""Between the SDK's plain data and the public messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from paceline.request import FinishReason
from paceline.results import (
    Choice,
    Chunk,
    Completion,
    Generation,
    HandoffBytes,
    ModelInfo,
    NodeInfo,
    ServedBy,
    SpeculationStats,
    Timing,
    Tokenization,
    Usage,
)
from paceline.v1 import common_pb2, inference_pb2
from paceline.wire import finish_reason_from_proto, logprobs_from_proto, round_from_proto

Messages = Sequence[Mapping[str, str]]  # [{"role": "user", "content": "..."}]
Prompt = str | Sequence[int] | Messages


class GenerateOptions(TypedDict, total=False):
    """Options of a generation; what is left out, or None, takes the server's default (the OpenAI API's)."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    top_logprobs: int | None  # 0: of the chosen token alone
    n: int | None
    num_draft_tokens: int | None  # K of speculation; 0 turns it off
    tree_width: int | None  # candidates per expanded node
    drafter: str | None  # one of the deployment's
    tree: str | None  # chain, static or dynamic
    model: str | None
    request_id: str | None
    tenant: str | None  # scope of the prefix cache
    priority: int | None  # -10 to 10: among the tenant's requests that wait, the higher one goes first


_SPECULATION = ("num_draft_tokens", "tree_width", "drafter", "tree")
_REQUEST = ("model", "request_id", "tenant", "priority")


def generate_request(prompt: Prompt, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """TypeError on an unknown option or a value of the wrong type, ValueError on one that no field can hold."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; known: {', '.join(GenerateOptions.__annotations__)}")
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = (stop,)
    request = {name: given.pop(name) for name in _REQUEST if name in given}
    speculation = {name: given.pop(name) for name in _SPECULATION if name in given}
    message = inference_pb2.GenerateRequest(**request, sampling=common_pb2.SamplingParams(**given))
    if speculation:
        message.speculation.CopyFrom(common_pb2.Speculation(**speculation))
    _set_prompt(message, prompt)
    return message


def _set_prompt(message: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    elif _is_chat(prompt):
        message.chat.CopyFrom(chat_message(prompt))  # type: ignore[arg-type]
    else:
        message.token_ids.CopyFrom(inference_pb2.TokenIds(ids=prompt))  # type: ignore[arg-type]


def _is_chat(prompt: Sequence[Any]) -> bool:
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def chat_message(messages: Messages) -> inference_pb2.Chat:
    """TypeError when a message has other keys than role and content."""
    for message in messages:
        if set(message) != {"role", "content"}:
            raise TypeError(f"a chat message has exactly role and content, got {sorted(message)}")
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message) for message in messages])


def tokenize_request(prompt: str | Messages) -> inference_pb2.TokenizeRequest:
    """Of a text or a chat."""
    if isinstance(prompt, str):
        return inference_pb2.TokenizeRequest(text=prompt)
    return inference_pb2.TokenizeRequest(chat=chat_message(prompt))


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
    )


def completion(message: inference_pb2.Completion) -> Completion:
    """How one choice ended."""
    usage, spec, timing, handoff = message.usage, message.speculation, message.timing, message.handoff
    return Completion(
        finish_reason=finish_reason_from_proto(message.finish_reason) or FinishReason.ABORT,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
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
        ),
        timing=Timing(timing.ttft_s, timing.e2e_s, timing.decode_tokens_per_s),
        nodes=ServedBy(message.nodes.prefill, message.nodes.decode),
        handoff=HandoffBytes(handoff.target_kv, handoff.draft_kv, handoff.hidden, handoff.meta),
        seed=message.seed,
        request_id=message.request_id,
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
        )
        for choice in message.choices
    )
    return Generation(message.request_id, message.model, choices)


def model_info(message: inference_pb2.ModelInfoResponse) -> ModelInfo:
    """What is served."""
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
    )
