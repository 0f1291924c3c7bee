"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Unpack

import grpc.aio

from paceline.client import convert
from paceline.client.channel import CHANNEL_OPTIONS, DEFAULT_TIMEOUT_S
from paceline.client.convert import GenerateOptions, Messages, Prompt
from paceline.results import Chunk, Generation, ModelInfo, Tokenization
from paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline.wire import error_from_rpc


class AsyncChunkStream(AsyncIterator[Chunk]):
    """Chunks of one generation, once. Closing it, or dropping it, cancels the request."""

    def __init__(self, call: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._call = call

    async def __anext__(self) -> Chunk:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return convert.chunk(message)

    async def aclose(self) -> None:
        """Cancel what is left of the request. Idempotent."""
        self._call.cancel()

    async def __aenter__(self) -> AsyncChunkStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        loop = getattr(self, "_loop", None)  # missing when made outside a running loop
        if loop is not None and not loop.is_closed():  # the collector may run on any thread
            loop.call_soon_threadsafe(self._call.cancel)


class AsyncClient:
    """A connection to a router, for the event loop it is made on. Use as an async context manager, or ``close`` it.

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
        self._channel = grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *options])
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def generate(
        self, prompt: Prompt, /, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Generate and wait for all of it. prompt: text, token ids, or chat messages; options: GenerateOptions."""
        request = convert.generate_request(prompt, options)
        return convert.generation(await self._call(self._stub.Generate, request, timeout))

    async def chat(
        self, messages: Messages, /, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Answer a chat; the model's template is applied by the router."""
        return await self.generate(messages, timeout=timeout, **options)

    def stream(
        self, prompt: Prompt, /, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncChunkStream:
        """Generate, as it comes. Errors are raised while iterating."""
        request = convert.generate_request(prompt, options)
        return AsyncChunkStream(self._stub.GenerateStream(request, timeout=self._seconds(timeout)))

    async def tokenize(self, prompt: str | Messages, /, *, timeout: float | None = None) -> Tokenization:
        """Token ids of a text or a chat."""
        request = convert.tokenize_request(prompt)
        return convert.tokenization(await self._call(self._stub.Tokenize, request, timeout))

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """What is served and how."""
        return convert.model_info(await self._call(self._stub.ModelInfo, inference_pb2.ModelInfoRequest(), timeout))

    async def close(self) -> None:
        """Close the connection; requests in progress are cancelled. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout

    async def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return await method(request, timeout=self._seconds(timeout))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
