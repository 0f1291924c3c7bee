"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import grpc

from paceline.client import convert
from paceline.client.channel import CHANNEL_OPTIONS, DEFAULT_TIMEOUT_S
from paceline.client.convert import GenerateOptions, Messages, Prompt
from paceline.results import Chunk, Generation, ModelInfo, Tokenization
from paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline.wire import error_from_rpc


class ChunkStream(Iterator[Chunk]):
    """Chunks of one generation, once. Closing it, or dropping it, cancels the request."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __next__(self) -> Chunk:
        try:
            return convert.chunk(next(self._call))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    def close(self) -> None:
        """Cancel what is left of the request. Idempotent."""
        self._call.cancel()

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """A connection to a router. Thread-safe; use as a context manager, or ``close`` it.

    Every method raises PacelineError (see paceline.errors). Timeouts are seconds for the whole call; a method's own
    ``timeout`` replaces the client's.
    """

    def __init__(
        self,
        address: str,
        /,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """address: ``host:port`` of a router's gRPC. options: gRPC channel options, over the defaults."""
        self._timeout = timeout
        self._channel = grpc.insecure_channel(address, options=[*CHANNEL_OPTIONS, *options])
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def generate(
        self, prompt: Prompt, /, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Generate and wait for all of it. prompt: text, token ids, or chat messages; options: GenerateOptions."""
        request = convert.generate_request(prompt, options)
        return convert.generation(self._call(self._stub.Generate, request, timeout))

    def chat(
        self, messages: Messages, /, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Answer a chat; the model's template is applied by the router."""
        return self.generate(messages, timeout=timeout, **options)

    def stream(
        self, prompt: Prompt, /, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> ChunkStream:
        """Generate, as it comes. Errors are raised while iterating."""
        request = convert.generate_request(prompt, options)
        return ChunkStream(self._stub.GenerateStream(request, timeout=self._seconds(timeout)))

    def tokenize(self, prompt: str | Messages, /, *, timeout: float | None = None) -> Tokenization:
        """Token ids of a text or a chat."""
        request = convert.tokenize_request(prompt)
        return convert.tokenization(self._call(self._stub.Tokenize, request, timeout))

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """What is served and how."""
        return convert.model_info(self._call(self._stub.ModelInfo, inference_pb2.ModelInfoRequest(), timeout))

    def close(self) -> None:
        """Close the connection; requests in progress are cancelled. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout

    def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return method(request, timeout=self._seconds(timeout))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
