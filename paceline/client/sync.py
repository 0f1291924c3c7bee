"""The blocking client."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import grpc

from paceline.client import convert
from paceline.client.channel import DEFAULT_TIMEOUT_S, Tls, channel_options, key_metadata, open_channel
from paceline.client.chats import ChatOptions, Messages
from paceline.client.convert import GenerateOptions, Prompt
from paceline.client.failover import DEFAULT_RETRIES, Patience, Routers
from paceline.client.progress import StreamProgress
from paceline.client.watch import Place, Silent, Watch
from paceline.errors import PacelineError, RequestCancelled
from paceline.results import Chunk, Generation, Model, ModelInfo, RequestTrace, Tokenization
from paceline.rpc.wire_errors import error_from_rpc
from paceline.v1 import inference_pb2, inference_pb2_grpc, trace_pb2
from paceline.wire import trace_from_proto

log = logging.getLogger(__name__)


class ChunkStream(Iterator[Chunk]):
    """Chunks of one generation, once, whichever routers bring them. Closing it, or dropping it, cancels the request."""

    def __init__(
        self, routers: Routers[grpc.Channel], progress: StreamProgress, patience: Patience, watch: Watch
    ) -> None:
        self._routers, self._progress, self._patience, self._watch = routers, progress, patience, watch
        self._closed = threading.Event()
        self._place = Place()
        self._open(progress.request)

    def _open(self, request: inference_pb2.GenerateRequest) -> None:
        router, stub = self._routers.current
        self._call = stub.GenerateStream(request, timeout=self._patience.left_s, metadata=self._routers.metadata)
        self._place.enter(router, self._call)

    def __next__(self) -> Chunk:
        try:
            while True:
                self._place.since = time.monotonic()
                try:
                    message = next(self._call)
                except grpc.RpcError as error:
                    self._go_on_after(Silent() if self._place.silent and not self._closed.is_set() else error)
                    continue
                self._take(message)
                return convert.chunk(message)
        except BaseException:
            self._place.over = True
            raise
        finally:
            self._place.since = None

    def _take(self, message: inference_pb2.GenerateChunk) -> None:
        started = self._progress.started
        self._progress.take(message)
        self._watch.heard(self._place.router)
        self._patience.progressed()
        if not started:
            self._watch.add(self._place)

    def _go_on_after(self, error: grpc.RpcError) -> None:
        """Ask the next router for the rest. Raises when there is none, or no use in it."""
        if self._closed.is_set():
            raise error_from_rpc(error) from None
        if self._progress.complete:  # only the end of the stream was lost
            raise StopIteration
        try:
            pause = self._patience.pause_s(error, started=self._progress.started)
        except PacelineError as known:
            raise known from None
        self._routers.failed(self._place.router)
        said = self._progress.name, self._place.router, error.code(), error.details()
        log.info("%s: router %d is left after %s: %s", *said)
        if self._closed.wait(pause):
            raise RequestCancelled("the stream was closed")
        self._open(self._progress.resuming())
        if self._closed.is_set():  # by another thread, which could not see the new call
            self._call.cancel()

    def close(self) -> None:
        """Cancel what is left of the request. Idempotent."""
        self._place.over = True
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):  # missing when it could not be made
            self.close()


class Client:
    """A connection to a router. Thread-safe; use as a context manager, or ``close`` it.

    Every method raises PacelineError (see paceline.errors). Timeouts are seconds for the whole call; a method's own
    ``timeout`` replaces the client's. A stream whose router dies, or answers nothing, goes on at the next one, at the
    next token. A call that a router refuses is made at the next one. Where routers refuse those too, fewer and fewer
    are, so that clients do not add to the load of routers that have too much.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        /,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        tls: Tls = False,
        options: Sequence[tuple[str, Any]] = (),
        api_key: str | None = None,
    ) -> None:
        """Nothing is connected before the first call.

        address: ``host:port`` of a router's gRPC, or of several, which are used in this order when one fails.
        timeout: seconds for a whole call, retries included.
        retries: how often in a row, without a new chunk, a stream that broke is asked for again.
        tls: True checks the router's certificate with the system's roots, a path with the CA in that file. gRPC's own
        channel credentials are taken too, e.g. with a client certificate. OSError when the file cannot be read.
        options: gRPC channel options, over the SDK's own.
        api_key: sent with every call; without it that of the environment's PACELINE_API_KEY, if there is one.
        """
        self._timeout, self._retries, metadata = timeout, retries, key_metadata(api_key)
        all_options = channel_options(address, options)
        self._routers: Routers[grpc.Channel] = Routers(
            address,
            lambda at: open_channel(at, tls, all_options),
            inference_pb2_grpc.InferenceStub,
            metadata,
        )
        self._watch = Watch(self._routers.channels)

    def generate(
        self, prompt: Prompt, /, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Generate and wait for all choices.

        prompt: a text, token ids, or chat messages (a list of ``{"role": ..., "content": ...}``).
        timeout: seconds, in place of the client's.
        options: those of GenerateOptions. TypeError for an unknown one or a value of a wrong type, ValueError for one
        that no request can hold.
        """
        request = convert.generate_request(prompt, options)
        return convert.generation(self._call("Generate", request, timeout))

    def chat(
        self, messages: Messages, /, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Answer a chat: ``generate`` with messages alone.

        messages: turns; the router applies the model's chat template. A turn has ``role`` and ``content``, one of the
        assistant perhaps ``tool_calls`` and ``reasoning`` (Choice.message is such a turn), one of a tool
        ``tool_call_id``.
        timeout, options: as for ``generate``.
        """
        return self.generate(messages, timeout=timeout, **options)

    def parse(
        self,
        model: type[Model],
        prompt: Prompt,
        /,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Model:
        """Generate an object: ``generate`` with ``response_format=model``, and the answer as an instance of it. Raises
        IncompleteAnswer, which holds the text, when the answer ended before it was whole.

        model: a pydantic model (version 2), or a class with its ``model_json_schema`` and ``model_validate_json``.
        prompt, timeout, options: as for ``generate``, but for ``response_format``.
        """
        request = convert.parse_request(model, prompt, options)
        return convert.generation(self._call("Generate", request, timeout)).parsed(model)

    def stream(
        self, prompt: Prompt, /, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> ChunkStream:
        """Generate, and iterate over tokens as they come: of a round, or of some. Errors are raised while iterating.

        prompt, timeout, options: as for ``generate``. Chunks of several choices (``n``) come interleaved. Close the
        stream, or leave its context, to cancel what is left.
        """
        request = convert.generate_request(prompt, options)
        return ChunkStream(self._routers, StreamProgress(request), self._patience(timeout), self._watch)

    def tokenize(
        self, prompt: str | Messages, /, *, timeout: float | None = None, **options: Unpack[ChatOptions]
    ) -> Tokenization:
        """Token ids of a prompt, as ``generate`` would take it.

        prompt: a text or chat messages.
        timeout: seconds, in place of the client's.
        options: those of ChatOptions, for a chat.
        """
        request = convert.tokenize_request(prompt, options)
        return convert.tokenization(self._call("Tokenize", request, timeout))

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """What is served and how: model, limits, drafters, nodes.

        timeout: seconds, in place of the client's.
        """
        return convert.model_info(self._call("ModelInfo", inference_pb2.ModelInfoRequest(), timeout))

    def trace(self, request_id: str, /, *, timeout: float | None = None) -> RequestTrace:
        """The timeline of one of the latest requests, on the router and all nodes. Raises NotFound when it is not kept.

        request_id: the one that was given, or ``completion.request_id``.
        timeout: seconds, in place of the client's.
        """
        request = trace_pb2.TraceRequest(request_id=request_id)
        return trace_from_proto(request_id, self._call("Trace", request, timeout))

    def close(self) -> None:
        """Close the connection; requests in progress are cancelled. Idempotent."""
        self._watch.close()
        for channel in self._routers.channels:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _patience(self, timeout: float | None) -> Patience:
        timeout_s = self._timeout if timeout is None else timeout
        return Patience(len(self._routers), self._retries, timeout_s, budget=self._routers.budget)

    def _call(self, method: str, request: Any, timeout: float | None) -> Any:
        """Ask each router at most once, and again where a router was lost at work (Patience): no call changes anything,
        so one that broke can be made again."""
        patience = self._patience(timeout)
        while True:
            router, stub = self._routers.current
            try:
                asked = getattr(stub, method)
                answer = asked(request, timeout=patience.left_s, metadata=self._routers.metadata)
            except grpc.RpcError as error:
                try:
                    patience.pause_s(error, started=False)
                except PacelineError as known:
                    raise known from None
                self._routers.failed(router)
            else:
                patience.progressed()
                return answer
