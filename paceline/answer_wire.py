"""Answers to the public messages, as ``paceline.client.convert`` reads them. No torch, no gRPC."""

from __future__ import annotations

from paceline.results import Chunk, Completion, Generation, ModelInfo, Tokenization
from paceline.v1 import inference_pb2
from paceline.wire import (
    finish_reason_to_proto,
    logprobs_to_proto,
    round_to_proto,
    tool_call_part_to_proto,
    tool_call_to_proto,
)


def tokenize_response(result: Tokenization) -> inference_pb2.TokenizeResponse:
    """Token ids."""
    return inference_pb2.TokenizeResponse(token_ids=result.token_ids, max_model_len=result.max_model_len)


def generate_chunk(chunk: Chunk) -> inference_pb2.GenerateChunk:
    """One step of a stream."""
    message = inference_pb2.GenerateChunk(
        choice=chunk.choice,
        first_index=chunk.first_index,
        token_ids=chunk.token_ids,
        text=chunk.text,
        logprobs=[logprobs_to_proto(entry) for entry in chunk.logprobs],
        reasoning=chunk.reasoning,
        tool_calls=[tool_call_part_to_proto(part) for part in chunk.tool_calls],
        prompt_logprobs=[logprobs_to_proto(entry) for entry in chunk.prompt_logprobs],
    )
    if chunk.round is not None:
        message.round.CopyFrom(round_to_proto(chunk.round))
    if chunk.completion is not None:
        message.completion.CopyFrom(completion_message(chunk.completion))
    return message


def completion_message(completion: Completion) -> inference_pb2.Completion:
    """How one choice ended."""
    usage, spec, timing = completion.usage, completion.speculation, completion.timing
    nodes, handoff = completion.nodes, completion.handoff
    return inference_pb2.Completion(
        finish_reason=finish_reason_to_proto(completion.finish_reason),
        usage=inference_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        ),
        speculation=inference_pb2.SpeculationStats(
            rounds=spec.rounds,
            draft_tokens=spec.draft_tokens,
            accepted_tokens=spec.accepted_tokens,
            acceptance_length=spec.acceptance_length,
            accepted_per_position=spec.accepted_per_position,
            drafted_per_position=spec.drafted_per_position,
            accepted_per_round=spec.accepted_per_round,
            rounds_by_drafter=spec.rounds_by_drafter,
            draft_s=spec.draft_s,
            verify_s=spec.verify_s,
            lossless=spec.lossless,
            predicted_tokens=spec.predicted_tokens,
            accepted_predicted_tokens=spec.accepted_predicted_tokens,
        ),
        timing=inference_pb2.Timing(
            ttft_s=timing.ttft_s, e2e_s=timing.e2e_s, decode_tokens_per_s=timing.decode_tokens_per_s
        ),
        nodes=inference_pb2.ServedBy(prefill=nodes.prefill, decode=nodes.decode),
        handoff=inference_pb2.HandoffBytes(
            target_kv=handoff.target_kv, draft_kv=handoff.draft_kv, hidden=handoff.hidden, meta=handoff.meta
        ),
        seed=completion.seed,
        request_id=completion.request_id,
        stop_string=completion.stop_string,
    )


def generate_response(result: Generation) -> inference_pb2.GenerateResponse:
    """A complete answer."""
    return inference_pb2.GenerateResponse(
        request_id=result.request_id,
        model=result.model,
        choices=[
            inference_pb2.Choice(
                index=choice.index,
                text=choice.text,
                token_ids=choice.token_ids,
                logprobs=[logprobs_to_proto(entry) for entry in choice.logprobs],
                completion=completion_message(choice.completion),
                reasoning=choice.reasoning,
                tool_calls=[tool_call_to_proto(call) for call in choice.tool_calls],
                prompt_logprobs=[logprobs_to_proto(entry) for entry in choice.prompt_logprobs],
            )
            for choice in result.choices
        ],
    )


def model_info_response(info: ModelInfo) -> inference_pb2.ModelInfoResponse:
    """What is served and how."""
    return inference_pb2.ModelInfoResponse(
        model=info.model,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        drafter=info.drafter,
        num_draft_tokens=info.num_draft_tokens,
        bit_exact=info.bit_exact,
        drafters=info.drafters,
        tree=info.tree,
        acceptance=info.acceptance,
        system_fingerprint=info.system_fingerprint,
        weights=info.weights,
        kernels=info.kernels,
        aliases=info.aliases,
        nodes=[
            inference_pb2.NodeInfo(
                id=node.id,
                role=node.role,
                address=node.address,
                running=node.running,
                waiting=node.waiting,
                free_pages=node.free_pages,
                total_pages=node.total_pages,
            )
            for node in info.nodes
        ],
    )
