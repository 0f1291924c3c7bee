"""The RPCs of the public surface: their kinds, and valid messages to begin with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from paceline.v1 import common_pb2, inference_pb2, trace_pb2
from tests.fuzz.proto_mutations import WIRE, extreme

INFERENCE = "/paceline.v1.Inference"
MOST_SENT = 3 << 20  # bytes; more than 4 MiB is gRPC's own to refuse
GENERATION_ID = "fuzzfuzzfuzzfuzzfuzzfuzz"


@dataclass(frozen=True)
class Rpc:
    """One RPC as a generic channel calls it."""

    path: str
    answer: type[Message]
    streams_in: bool = False
    streams_out: bool = False
    endless: bool = False  # the answers never end: the first is enough
    weight: int = 1


RPCS = (
    Rpc(f"{INFERENCE}/Generate", inference_pb2.GenerateResponse, weight=8),
    Rpc(f"{INFERENCE}/GenerateStream", inference_pb2.GenerateChunk, streams_out=True, weight=8),
    Rpc(f"{INFERENCE}/Tokenize", inference_pb2.TokenizeResponse, weight=3),
    Rpc(f"{INFERENCE}/ModelInfo", inference_pb2.ModelInfoResponse),
    Rpc(f"{INFERENCE}/Trace", trace_pb2.TraceResponse, weight=2),
    Rpc("/grpc.health.v1.Health/Check", health_pb2.HealthCheckResponse),
    Rpc("/grpc.health.v1.Health/List", health_pb2.HealthListResponse),
    Rpc("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckResponse, streams_out=True, endless=True),
    Rpc(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionResponse,
        streams_in=True,
        streams_out=True,
    ),
)


def valid(rng: random.Random, rpc: Rpc) -> Any:
    """A message that the RPC understands."""
    match rpc.path.rpartition("/")[2]:
        case "Generate" | "GenerateStream":
            return _generate(rng)
        case "Tokenize":
            return inference_pb2.TokenizeRequest(text="hello") if rng.random() < 0.5 else _chat_tokens()
        case "Trace":
            return trace_pb2.TraceRequest(request_id=rng.choice(("fuzz-1", "unknown")))
        case "Check" | "Watch":
            return health_pb2.HealthCheckRequest(service=rng.choice(("", "paceline.v1.Inference")))
        case "ServerReflectionInfo":
            return _reflection(rng)
        case "List":
            return health_pb2.HealthListRequest()
    return inference_pb2.ModelInfoRequest()


def _generate(rng: random.Random) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        model=rng.choice(("", "tiny")), tenant=rng.choice(("", "a")), request_id=rng.choice(("", "", "fuzz-1"))
    )
    match rng.randrange(3):
        case 0:
            request.text = "hello"
        case 1:
            request.token_ids.ids.extend(rng.randrange(258) for _ in range(rng.randint(1, 20)))
        case _:
            request.chat.CopyFrom(_chat_tokens().chat)
    request.sampling.CopyFrom(
        common_pb2.SamplingParams(
            temperature=rng.choice((0.0, 1.0)), max_tokens=rng.randint(1, 6), seed=rng.randrange(2**64)
        )
    )
    if rng.random() < 0.3:
        request.sampling.MergeFrom(
            common_pb2.SamplingParams(top_p=0.9, top_k=5, stop=["ab"], stop_token_ids=[7], top_logprobs=2, n=2)
        )
        request.sampling.logit_bias[5] = 1.5
    if rng.random() < 0.3:
        request.speculation.CopyFrom(
            common_pb2.Speculation(num_draft_tokens=2, tree_width=2, drafter="suffix", tree="dynamic")
        )
    if rng.random() < 0.2:
        request.generation_id = GENERATION_ID
        if rng.random() < 0.5:
            request.resume.choices.add(next_index=1, token_ids=[65])
    return request


def _chat_tokens() -> inference_pb2.TokenizeRequest:
    turns = [inference_pb2.ChatMessage(role=role, content="hi") for role in ("system", "user")]
    return inference_pb2.TokenizeRequest(chat=inference_pb2.Chat(messages=turns))


def _reflection(rng: random.Random) -> reflection_pb2.ServerReflectionRequest:
    request = reflection_pb2.ServerReflectionRequest(host="x")
    match rng.randrange(4):
        case 0:
            request.file_by_filename = "paceline/v1/inference.proto"
        case 1:
            request.file_containing_symbol = "paceline.v1.Inference"
        case 2:
            request.file_containing_extension.containing_type = "google.protobuf.FieldOptions"
            request.file_containing_extension.extension_number = 1001
        case _:
            request.list_services = ""
    return request


@dataclass(frozen=True)
class Wrong:
    """A message to send, and how it was made."""

    rpc: Rpc
    how: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.rpc.path} ({self.how}): {self.data[:2000].hex()} ({len(self.data)} bytes)"


def wrong(
    rng: random.Random, rpcs: tuple[Rpc, ...] = RPCS, valid: Callable[[random.Random, Rpc], Any] = valid
) -> Wrong:
    """A message that is wrong somehow, or by chance still right."""
    rpc = rng.choices(rpcs, [rpc.weight for rpc in rpcs])[0]
    message = valid(rng, rpc)
    if rng.random() < 0.45 and message.DESCRIPTOR.fields:
        count = rng.choice((1, 1, 1, 2, 4))
        extreme(rng, message, count)
        return Wrong(rpc, f"{count} extreme", message.SerializeToString())
    hows, data = [], message.SerializeToString()
    for _ in range(rng.choice((1, 1, 2))):
        hows.append(rng.choice(list(WIRE)))
        data = WIRE[hows[-1]](rng, data)
    return Wrong(rpc, " + ".join(hows), data[:MOST_SENT])
