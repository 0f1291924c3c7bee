"""The fake server: a gRPC server on threads of its own."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NoReturn

import grpc

from paceline import answer_wire
from paceline.client.testing.asked import Asked, asked, chat_options, messages
from paceline.client.testing.script import (
    DRAFTER,
    VOCAB_SIZE,
    Answer,
    Script,
    check_possible,
    chunk_of,
    end_of,
    rounds_of,
    tokens_of,
)
from paceline.errors import InvalidRequest, NodeUnavailable, NotFound, PacelineError
from paceline.request import SamplingParams, derive_seed
from paceline.results import (
    Chunk,
    Completion,
    Generation,
    ModelInfo,
    NodeInfo,
    ServedBy,
    SpeculationStats,
    Timing,
    Tokenization,
    Usage,
    choices_of,
)
from paceline.rpc.wire_errors import metadata_for, status_for
from paceline.v1 import inference_pb2, inference_pb2_grpc, trace_pb2
from paceline.wire import sampling_from_proto

MAX_MODEL_LEN = 32_768
DEFAULT_MAX_TOKENS = 1024
THREADS = 64  # calls at once
PLAN_DIGEST = bytes(16)
SEED = 7  # of a request without one


class FakeServer:
    """Answers requests in the order of a script. A request beyond the script fails, and says so.

    ``address`` is for ``Client`` and ``AsyncClient``, ``requests`` has what was asked, resumes included. Use it as a
    context manager, also with ``async with``; it keeps every request until then.
    """

    def __init__(self, *script: Script, model: str = "fake") -> None:
        """The server listens at once, at a free port of this machine.

        script: an item for each request: a text, an Answer, an error that refuses it, or a function of what is asked
        that returns one of them.
        model: the name of what is served.
        """
        self.model = model
        self.requests: list[Asked] = []
        self._script = list(script)
        self._lock = threading.Lock()
        self._streams: dict[str, _Reply] = {}
        options = [("grpc.so_reuseport", 0)]
        self._server = grpc.server(ThreadPoolExecutor(THREADS, "paceline-fake"), options=options)
        inference_pb2_grpc.add_InferenceServicer_to_server(_Service(self), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def add(self, *script: Script) -> None:
        """Append to the script.

        script: as for the constructor.
        """
        with self._lock:
            self._script.extend(script)

    def close(self) -> None:
        """Stop; calls in progress break. Idempotent."""
        self._server.stop(0).wait()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> FakeServer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def _reply(self, message: inference_pb2.GenerateRequest, *, streamed: bool) -> _Reply:
        """What answers ``message``. Raises the script's error, InvalidRequest, NotFound."""
        one = asked(message, streamed=streamed)
        with self._lock:
            self.requests.append(one)
            if message.generation_id in self._streams:
                had = {received.choice: received for received in message.resume.choices}
                return replace(self._streams[message.generation_id], had=had, broke=True)
        if message.resume.choices:
            raise NotFound(f"generation {message.generation_id!r} is not known")
        sampling = self._checked(message, one)
        with self._lock:
            if not self._script:
                raise PacelineError(f"the script has no answer for request {len(self.requests)}")
            said = self._script.pop(0)
        said = said(one) if callable(said) else said
        if isinstance(said, PacelineError):
            raise said
        answer = Answer(said) if isinstance(said, str) else said
        try:
            check_possible(answer, one)
        except ValueError as error:
            raise PacelineError(str(error)) from None
        reply = _Reply(answer, sampling, message.request_id or f"req-{uuid.uuid4().hex}", len(_prompt_ids(message)))
        if message.generation_id:  # a stream's
            with self._lock:
                self._streams[message.generation_id] = reply
        return reply

    def _checked(self, message: inference_pb2.GenerateRequest, one: Asked) -> SamplingParams:
        if message.model and message.model != self.model:
            raise InvalidRequest("model", f"{self.model!r} is served, not {message.model!r}")
        if not one.prompt:
            raise InvalidRequest("prompt", "must not be empty")
        params = sampling_from_proto(message.sampling)
        if not message.sampling.HasField("max_tokens"):
            params = replace(params, max_tokens=DEFAULT_MAX_TOKENS)
        params.validate(VOCAB_SIZE)
        return replace(params, seed=SEED if params.seed is None else params.seed)


@dataclass(frozen=True)
class _Reply:
    """An answer to one request."""

    answer: Answer
    params: SamplingParams  # checked, with a seed
    request_id: str
    prompt_tokens: int
    had: dict[int, Any] = field(default_factory=dict)  # what the client has of a stream that broke, by choice
    broke: bool = False  # the connection broke once, so it holds now
    at: float = field(default_factory=time.monotonic)

    def chunks(self, wait: threading.Event) -> Iterator[Chunk]:
        """All chunks that the client does not have. wait: is set when nobody listens any more. Raises NodeUnavailable
        where the connection is to break, and the answer's error."""
        said = tokens_of(self.answer)[: self.params.max_tokens]
        wait.wait(self.answer.delay_s)
        self._break(0)
        for first, end in self._rounds(len(said)):
            if first and wait.wait(self.answer.pause_s):
                return
            for choice in range(self.params.n):
                begin = max(first, self._num_had(choice))
                if begin < end:
                    yield chunk_of(choice, said, begin, end, self.params.top_logprobs)
            self._break(end)
        for choice in range(self.params.n):
            if choice not in self.had or not self.had[choice].complete:
                yield Chunk(choice, len(said), completion=self._completion(choice, len(said)))

    def _rounds(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        """As the script has them, but that none goes on over the place of the break."""
        cut = self.answer.breaks_after or 0
        for first, end in rounds_of(num_tokens, max(1, self.answer.tokens_per_chunk)):
            if first < cut < end:
                yield first, cut
                yield cut, end
            else:
                yield first, end

    def _num_had(self, choice: int) -> int:
        return self.had[choice].next_index if choice in self.had else 0

    def _break(self, said: int) -> None:
        if self.answer.breaks_after != said:
            return
        if self.answer.error is not None:
            raise self.answer.error
        if not self.broke:
            raise NodeUnavailable("the connection broke, as the script says")

    def _completion(self, choice: int, num_tokens: int) -> Completion:
        drafted = tuple(end - first - 1 for first, end in self._rounds(num_tokens) if first)
        per_position = tuple(sum(one > depth for one in drafted) for depth in range(max(drafted, default=0)))
        spent = time.monotonic() - self.at
        return Completion(
            end_of(self.answer, self.params.max_tokens),
            Usage(self.prompt_tokens, num_tokens, 0),
            SpeculationStats(
                rounds=len(drafted),
                draft_tokens=sum(drafted),
                accepted_tokens=sum(drafted),
                acceptance_length=sum(drafted) / len(drafted) + 1 if drafted else 0.0,
                accepted_per_position=per_position,
                drafted_per_position=per_position,
                accepted_per_round=drafted,
                rounds_by_drafter={DRAFTER: len(drafted)} if drafted else {},
            ),
            Timing(self.answer.delay_s, spent, num_tokens / spent if spent else 0.0),
            ServedBy("prefill-0", "decode-0"),
            seed=derive_seed(self.params.seed or 0, choice),
            request_id=self.request_id,
        )


class _Service(inference_pb2_grpc.InferenceServicer):
    def __init__(self, server: FakeServer) -> None:
        self._fake = server

    def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> inference_pb2.GenerateResponse:
        try:
            reply = self._fake._reply(request, streamed=False)
            choices = choices_of(list(reply.chunks(_listening(context))))
        except PacelineError as error:
            _abort(context, error)
        return answer_wire.generate_response(Generation(reply.request_id, self._fake.model, choices))

    def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> Iterator[inference_pb2.GenerateChunk]:
        try:
            reply = self._fake._reply(request, streamed=True)
            for sent, chunk in enumerate(reply.chunks(_listening(context))):
                message = answer_wire.generate_chunk(chunk)
                if sent == 0:
                    message.resumable.generation_id = request.generation_id
                    message.resumable.seed = reply.params.seed or 0
                    message.resumable.plan_digest = PLAN_DIGEST
                yield message
        except PacelineError as error:
            _abort(context, error)

    def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        chat = request.chat if request.HasField("chat") else None
        ids = list(request.text.encode()) if chat is None else _chat_ids(chat)
        return answer_wire.tokenize_response(Tokenization(tuple(ids), MAX_MODEL_LEN))

    def ModelInfo(self, request: inference_pb2.ModelInfoRequest, context: Any) -> inference_pb2.ModelInfoResponse:
        nodes = tuple(NodeInfo(f"{role}-0", role, self._fake.address) for role in ("prefill", "decode"))
        info = ModelInfo(self._fake.model, "bf16", MAX_MODEL_LEN, VOCAB_SIZE, DRAFTER, 3, True, nodes, (DRAFTER,))
        return answer_wire.model_info_response(info)

    def Trace(self, request: trace_pb2.TraceRequest, context: Any) -> trace_pb2.TraceResponse:
        _abort(context, NotFound(f"no trace of {request.request_id!r} is kept"))


def _abort(context: Any, error: PacelineError) -> NoReturn:
    code, details = status_for(error)
    context.set_trailing_metadata(metadata_for(error))
    context.abort(code, details)
    raise AssertionError("unreachable: the context was aborted")


def _listening(context: Any) -> threading.Event:
    """Is set when the call is over."""
    over = threading.Event()
    if not context.add_callback(over.set):
        over.set()
    return over


def _prompt_ids(message: inference_pb2.GenerateRequest) -> list[int]:
    """A byte a token."""
    match message.WhichOneof("prompt"):
        case "chat":
            return _chat_ids(message.chat)
        case "token_ids":
            return list(message.token_ids.ids)
        case _:
            return list(message.text.encode())


def _chat_ids(chat: inference_pb2.Chat) -> list[int]:
    """A chat is its tools, and its turns, each behind its role."""
    turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in messages(chat))
    return list(f"{chat_options(chat).get('tools', '')}{turns}<assistant>".encode())
