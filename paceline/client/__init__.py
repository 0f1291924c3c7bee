"""The client SDK. Needs grpcio and protobuf, nothing else.

    from paceline.client import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("In a paceline", max_tokens=32, seed=1).text)
        for chunk in client.stream([{"role": "user", "content": "Hello"}]):
            print(chunk.text, end="")

Errors are those of paceline.errors, PacelineError at their root.
"""

from paceline.client.aio import AsyncChunkStream, AsyncClient
from paceline.client.chats import ChatOptions, Messages
from paceline.client.convert import GenerateOptions, Prompt
from paceline.client.formats import ResponseFormat
from paceline.client.sync import ChunkStream, Client
from paceline.errors import (
    ConfigError,
    DeadlineExceeded,
    HandoffFailed,
    IncompleteAnswer,
    InvalidRequest,
    NodeUnavailable,
    NotFound,
    Overloaded,
    PacelineError,
    PairingRefused,
    PermissionDenied,
    RequestCancelled,
    Unauthenticated,
)
from paceline.request import FinishReason, TokenLogprobs
from paceline.results import (
    Choice,
    Chunk,
    Completion,
    Generation,
    HandoffBytes,
    JsonModel,
    ModelInfo,
    NodeInfo,
    RequestTrace,
    Round,
    ServedBy,
    SpeculationStats,
    Timing,
    Tokenization,
    ToolCall,
    ToolCallPart,
    TraceEvent,
    Usage,
    choices_of,
)

__all__ = [
    "AsyncChunkStream",
    "AsyncClient",
    "ChatOptions",
    "Choice",
    "Chunk",
    "ChunkStream",
    "Client",
    "Completion",
    "ConfigError",
    "DeadlineExceeded",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "HandoffBytes",
    "HandoffFailed",
    "IncompleteAnswer",
    "InvalidRequest",
    "JsonModel",
    "Messages",
    "ModelInfo",
    "NodeInfo",
    "NodeUnavailable",
    "NotFound",
    "Overloaded",
    "PacelineError",
    "PairingRefused",
    "PermissionDenied",
    "Prompt",
    "RequestCancelled",
    "RequestTrace",
    "ResponseFormat",
    "Round",
    "ServedBy",
    "SpeculationStats",
    "Timing",
    "TokenLogprobs",
    "Tokenization",
    "ToolCall",
    "ToolCallPart",
    "TraceEvent",
    "Unauthenticated",
    "Usage",
    "choices_of",
]
