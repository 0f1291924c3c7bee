"""The router: admits requests, chooses nodes, puts the answers together (docs/internals/architecture.md#a-request).

Life of a request: admitted -> planned -> queued for its turn -> one task per choice, each of attempts on pairs of nodes
-> over. Chunks of all choices meet in one bounded queue; a client that reads slowly holds its nodes back. Closing the
generator cancels the tasks, and with them the calls to the nodes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from cluster.access.caller import Caller, as_asked_by, current, unknown_id
from cluster.access.quotas import Quotas
from cluster.contract.generation import GenerationRequest, Prompt, ReceivedChoice
from cluster.contract.plan import Plan, ServedModel, TokenizerLike, make_plan, tokenize
from cluster.contract.text_source import text_source
from cluster.contract.tools import answer_style
from cluster.routing.admission import Admission, Place, TenantBounds
from cluster.routing.attempt import Attempt, Shared
from cluster.routing.bypass import Bypass
from cluster.routing.choice import ChoiceRun, Detokenizer
from cluster.routing.metrics import Metrics
from cluster.routing.node_calls import NodeCalls, NodeFailure
from cluster.routing.pairing import Pairing, Tries
from cluster.routing.reading import ChunkQueue, Reading
from cluster.routing.recall import Recall
from cluster.routing.resume import find_admitted, journaled, received_of
from cluster.routing.traces import Owners, collect, not_kept
from cluster.state.journal import Journal
from cluster.state.prefix_index import PrefixIndex
from cluster.state.registry_types import NodeRecord
from paceline.config import ServeConfig
from paceline.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, PacelineError
from paceline.grammar.check import GrammarChecker
from paceline.parsing.parser import make_parser
from paceline.request import MAX_N
from paceline.results import (
    Chunk,
    Generation,
    ModelInfo,
    NodeInfo,
    RequestTrace,
    TextSource,
    Tokenization,
    choices_of,
)
from paceline.tracing import NO_TRACE, Recorder

log = logging.getLogger(__name__)

UNKNOWN_SOURCE = TextSource()
QUEUE_CHUNKS = 32  # of one request, all choices together

DetokenizerFactory = Callable[[TokenizerLike, Sequence[int], Sequence[str]], Detokenizer]


class NodeView(Protocol):
    """cluster.state.registry.NodeDirectory, as far as the router needs it."""

    def nodes(self) -> list[NodeRecord]:
        """The nodes that are alive, by id."""


class Router:
    """Serves one model from the nodes that the registry lists."""

    # It has over 20 methods: one for each question of the front door, and the steps of a choice, which share its parts.

    def __init__(
        self,
        registry: NodeView,
        tokenizer: TokenizerLike,
        config: ServeConfig,
        model_name: str,
        max_model_len: int,
        vocab_size: int,
        *,
        metrics: Metrics | None = None,
        source: TextSource = UNKNOWN_SOURCE,
        detokenizer: DetokenizerFactory | None = None,
        journal: Journal | None = None,
        prefixes: PrefixIndex | None = None,
        grammars: GrammarChecker | None = None,
        calls: NodeCalls | None = None,
        quotas: Quotas | None = None,
    ) -> None:  # long: it is given the parts that it does not own, some with a name, and makes its own
        """model_name: the model's name in answers. source: what the nodes said of themselves. detokenizer: makes
        one per choice from tokenizer, prompt ids and stop strings; the default is paceline.text.tokenizer's. journal:
        of streams that other routers may go on with; started, and closed by its owner. prefixes: what nodes are thought
        to have cached; None: they are chosen by load alone. grammars: checks those of requests; None: nodes do.
        calls: to the nodes, closed with the router; None: as nobody in particular. quotas: what API keys may use,
        closed by its owner; None: nobody has a key."""
        self.config = config
        self.tokenizer = tokenizer
        style = answer_style(config, tokenizer.template)
        aliases = config.served_names[1:]
        self.served = ServedModel(model_name, max_model_len, vocab_size, config.selectable, config, style, aliases)
        self.metrics = metrics if metrics is not None else Metrics()
        self._quotas = Quotas(None, self.metrics) if quotas is None else quotas
        page_size = config.of_role("decode").page_size  # where a sequence has its pages reserved
        bounds = TenantBounds(trusted=quotas is not None, share=config.tenant_share if quotas is not None else 1.0)
        self._admission = Admission(
            config.max_inflight,
            config.max_queued,
            config.queue_timeout_s,
            bounds=bounds,
            kv_tokens=lambda: _kv_tokens(registry.nodes(), page_size),
        )
        self._registry = registry
        self._source = source
        self._journal = journal
        self._grammars = grammars
        self._detokenizer = detokenizer if detokenizer is not None else _incremental
        self._calls = calls if calls is not None else NodeCalls()
        self._recorder = Recorder(config.trace_requests)
        self._owners = Owners(config.trace_requests)
        self._pairing = Pairing(registry.nodes, self._calls, page_size, prefixes, wait_s=config.queue_timeout_s)
        self._recall = Recall(journal, self._pairing.likely, self._calls)
        self.quarantine = self._pairing.quarantine
        self.metrics.before_render(lambda: self.metrics.set_breakers(self._pairing.breaker_levels()))
        self.metrics.before_render(lambda: self.metrics.set_queued(self._admission.waiting))
        self._shared = Shared(
            self._calls,
            self.metrics,
            registry.nodes,
            config.lease_ttl_s,
            config.stream_interval_ms / 1e3,
            Bypass(config.bypass_tokens),
        )
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what is asked -----------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerationRequest, on_plan: Callable[[Plan], None] = lambda plan: None
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks of all choices as they come; the last one of each choice has its completion. on_plan: called before
        the first chunk.

        Close it (``contextlib.aclosing``) to cancel. Raises PacelineError: InvalidRequest before any chunk, Overloaded
        when there is no room, NodeUnavailable or HandoffFailed when retries did not help, DeadlineExceeded; of a
        request that resumes also UnknownGeneration.
        """
        started_at, caller = time.monotonic(), current()
        place, request = self._admit(request, caller)
        status, over, trace = "cancelled", self.metrics.request_refused, NO_TRACE
        hold, used = None, 0
        try:
            if request.resume is not None:
                request = as_asked_by(caller, await find_admitted(request, self._journal))
                self._admission.widen(place, self._num_choices(request))
            plan = await make_plan(request, self.served, self.tokenizer, self._grammars)
            hold = await self._quotas.hold(caller, len(plan.sequences), plan.num_tokens)
            self._owners.note(plan.request_id, plan.admitted.tenant, plan.sequences[0].cache_salt)
            trace = self._recorder.open(plan.request_id, "request", plan.sequences[0].cache_salt)
            trace.record("planned", started_at, time.monotonic(), prompt_tokens=plan.num_prompt_tokens)
            received = received_of(plan, request, self.served.vocab_size, self.config.acceptance == "sample")
            if request.keeps_told:
                received = await self._recall(plan, received)
            runs = self._choices(plan, received, started_at, request.resume is not None and request.resume.retell)
            await self._turn(place, plan)
            used = plan.num_prompt_tokens * len(plan.sequences)
            trace.record("admitted")
            over = self.metrics.request_ended
            on_plan(plan)
            with journaled(self._journal, plan, request, received) as tell:
                async with aclosing(self._run(runs, started_at, place)) as chunks:
                    async for chunk in chunks:
                        used += len(chunk.token_ids)
                        tell(chunk)
                        yield chunk
            status = "ok"
        except Exception as error:
            status = type(error).__name__
            raise
        finally:
            trace.record("request", started_at, time.monotonic(), status=status)
            self._admission.leave(place)
            self._quotas.release(hold, used)
            over(status)

    async def complete(self, request: GenerationRequest) -> Generation:
        """All choices at once."""
        async with aclosing(self.generate(request)) as chunks:
            return self._collect([chunk async for chunk in chunks])

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """Token ids of a text or a chat. Raises InvalidRequest, and Overloaded when there is no room."""
        with self._a_place():
            return Tokenization(await tokenize(prompt, self.tokenizer, self.served.style), self.served.max_model_len)

    def model_info(self) -> ModelInfo:
        """What is served and how. Nodes' addresses are for operators, where there are API keys."""
        shown = _sees_all(current())
        nodes = [
            NodeInfo(n.id, n.role, n.address if shown else "", n.running, n.waiting, n.free_pages, n.total_pages)
            for n in self._registry.nodes()
        ]
        return ModelInfo(
            model=self.served.model,
            aliases=self.served.aliases,
            dtype=self.config.of_role("decode").dtype,
            max_model_len=self.served.max_model_len,
            vocab_size=self.served.vocab_size,
            drafter=self.config.drafter,
            num_draft_tokens=self.config.num_draft_tokens,
            bit_exact=self._source.bit_exact,
            drafters=self.config.selectable,
            tree=self.config.tree,
            acceptance=self.config.acceptance,
            nodes=tuple(nodes),
            system_fingerprint=self._source.fingerprint,
            weights=self._source.weights,
            kernels=self._source.kernels,
        )

    @property
    def inflight(self) -> int:
        """Sequences that run or wait for their turn."""
        return self._admission.slots

    async def trace(self, request_id: str) -> RequestTrace:
        """When what happened to one of the latest requests. Raises NotFound, also for another tenant's, and Overloaded
        when there is no room."""
        caller, salt = current(), None
        if caller is not None and not _sees_all(caller):
            salt = self._owners.salt(caller.tenant, request_id)
            if salt is None:
                unknown_id("trace")
                raise not_kept(request_id, self._recorder.num_requests)
        with self._a_place():
            return await collect(request_id, self._recorder, self._registry.nodes(), self._calls, salt=salt)

    def ready(self) -> bool:
        """Whether a decode node is there to serve."""
        return bool(self._pairing.alive("decode"))

    def drain(self) -> None:
        """Refuse new requests with NodeUnavailable, at whichever door they come. Those that are there go on."""
        self._admission.drain()

    async def close(self) -> None:
        """Cancel what waits or is in progress and close the connections to the nodes. Idempotent."""
        self._admission.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._calls.close()

    # -- insides -----------------------------------------------------------------------------------------------

    def _admit(self, request: GenerationRequest, caller: Caller | None) -> tuple[Place, GenerationRequest]:
        """A place, and the request as its caller may ask it. Raises Overloaded, InvalidRequest, PermissionDenied."""
        try:
            request = as_asked_by(caller, request)
            return self._admission.enter(self._num_choices(request), request.tenant), request
        except PacelineError as error:
            self.metrics.request_refused(type(error).__name__)
            raise

    def _num_choices(self, request: GenerationRequest) -> int:
        """Each choice is a sequence on the nodes. Raises InvalidRequest for more than could run at once."""
        choices = min(max(request.sampling.n, 1), MAX_N)
        if MAX_N >= request.sampling.n > self.config.max_inflight:  # it could only run beyond the bound
            raise InvalidRequest("n", f"at most {self.config.max_inflight} sequences run here, got {choices}")
        return choices

    @contextmanager
    def _a_place(self) -> Iterator[None]:
        """For work that is no request. Raises Overloaded."""
        caller = current()
        place = self._admission.enter(1, "" if caller is None else caller.tenant)
        try:
            yield
        finally:
            self._admission.leave(place)

    async def _turn(self, place: Place, plan: Plan) -> None:
        """Wait until the request may run. Raises Overloaded, NodeUnavailable."""
        since = time.monotonic()
        await self._admission.turn(place, plan.admitted.tenant, plan.admitted.priority, plan.num_tokens)
        self.metrics.request_started(time.monotonic() - since)

    async def _run(self, runs: list[ChoiceRun], started_at: float, place: Place) -> AsyncGenerator[Chunk, None]:
        queue = ChunkQueue(QUEUE_CHUNKS)
        deadline = started_at + self.config.request_timeout_s
        reading = Reading(self.config.read_timeout_s, self._others_wait, lambda: self._unread(queue, tasks, place))
        tasks = [
            asyncio.create_task(self._run_choice(run, queue, deadline), name=run.sequence.request_id) for run in runs
        ]
        self._tasks.update(tasks)
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                with reading.of(queue):
                    yield item
                left -= item.completion is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)

    def _others_wait(self) -> bool:
        """Whether a request waits for its turn here, or at a node that decodes for pages."""
        return self._admission.waiting > 0 or any(n.waiting for n in self._registry.nodes() if n.role == "decode")

    def _unread(self, queue: ChunkQueue, tasks: list[asyncio.Task[None]], place: Place) -> None:
        """The client does not read: free the nodes and its place, and tell it should it come back."""
        self._admission.leave(place)
        for task in tasks:
            task.cancel()
        while not queue.empty():
            queue.get_nowait()
        queue.end(DeadlineExceeded(f"the client kept {QUEUE_CHUNKS} chunks waiting for too long"))

    def _choices(
        self, plan: Plan, received: Mapping[int, ReceivedChoice], started_at: float, retell: bool
    ) -> list[ChoiceRun]:
        """Those that the client does not have to the end, or with ``retell`` all. Raises InvalidRequest."""
        lossless = self.config.acceptance != "typical"
        runs = []
        for index, sequence in enumerate(plan.sequences):
            had = received.get(index)
            if had is not None and had.complete and not retell:
                continue
            form = plan.admitted.answer_format
            source = text_source(self.tokenizer, plan.admitted)
            detokenizer = self._detokenizer(source, sequence.prompt_token_ids, plan.stop)
            parser = None if form is None else make_parser(form, sequence.prompt_token_ids, sequence.params.seed or 0)
            run = ChoiceRun(index, plan.request_id, sequence, detokenizer, started_at, lossless, parser)
            run.trace = self._recorder.open(sequence.request_id, "choice", sequence.cache_salt)
            if had is not None:
                run.resume(had, retell)
            runs.append(run)
        return runs

    async def _run_choice(self, run: ChoiceRun, queue: ChunkQueue, deadline: float) -> None:
        """Put the chunks of a choice, then its completion or the error that ended it."""
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                if run.again is not None:
                    await queue.put(run.again)
                await self._attempts(run, queue, deadline)
                last = run.complete()
                await queue.put(last)
        except TimeoutError:
            timeout_s = self.config.request_timeout_s
            await queue.put(DeadlineExceeded(f"the request did not complete within {timeout_s:g} s"))
        except PacelineError as error:
            run.trace.record("failed", error=str(error))
            await queue.put(error)
        except asyncio.CancelledError:  # by ``close``, with a reader, or by the reader's end, without
            queue.end(NodeUnavailable("the router stops"))
            raise
        except Exception as error:  # a bug ends this request, visibly, and no other
            log.exception("request %s failed", run.sequence.request_id)
            await queue.put(error)
        else:
            if last.completion is not None:
                self.metrics.choice_ended(last.completion)

    async def _attempts(self, run: ChoiceRun, queue: ChunkQueue, deadline: float) -> None:
        """Attempts on pair after pair, each from where the last one ended, until the choice has its finish reason."""
        prompt, salt = run.sequence.prompt_token_ids, run.sequence.cache_salt
        tries = Tries(self._pairing.quarantine.suspicion(run.request_id, prompt, salt), bool(run.token_ids))
        num_tokens = len(prompt) + run.sequence.params.max_tokens
        run.end_by_tokens()  # where neither a token nor a log-probability is asked for
        while run.finish_reason is None:
            pair = await self._pairing.pick(tries, num_tokens, (*prompt, *run.token_ids), salt)
            before = len(run.token_ids)
            try:
                attempt = Attempt(run, pair, self._shared, queue.put, deadline)
                with self._pairing.judged(attempt, tries.suspicion):
                    await attempt.run()
            except NodeFailure as failure:
                if failure.gone and failure.node.role == "decode":
                    self._pairing.quarantine.lost(failure.node, tries.suspicion, len(run.token_ids) - before)
                if len(run.token_ids) > before:
                    tries.progressed()
                await self._after(failure, run, tries)

    async def _after(self, failure: NodeFailure, run: ChoiceRun, tries: Tries) -> None:
        """Remember a failure; returns when another attempt may help, or none is needed any more."""
        if run.finish_reason is not None:
            return
        run.end_by_tokens()
        if run.finish_reason is not None:
            return
        if isinstance(failure.error, InvalidRequest):
            raise failure.error
        self._pairing.suspect(failure)
        tries.note(failure, resuming=bool(run.token_ids))
        self.metrics.retried(type(failure.error).__name__)
        log.warning("%s: trying again after %s", run.sequence.request_id, failure)
        run.trace.record("retry", error=str(failure))
        await asyncio.sleep(tries.backoff_s(failure.error))

    def _collect(self, chunks: list[Chunk]) -> Generation:
        choices = choices_of(chunks)
        return Generation(choices[0].completion.request_id, self.served.model, choices)


def _kv_tokens(nodes: Sequence[NodeRecord], page_size: int) -> int:
    """Tokens that the KV caches of the decode nodes hold together."""
    return page_size * sum(node.total_pages for node in nodes if node.role == "decode")


def _sees_all(caller: Caller | None) -> bool:
    return caller is None or "operator" in caller.key.scopes


def _incremental(tokenizer: TokenizerLike, prompt_ids: Sequence[int], stop: Sequence[str]) -> Detokenizer:
    from paceline.text.tokenizer import IncrementalDetokenizer  # late: pulls in the tokenizers library

    make: Any = IncrementalDetokenizer
    made: Detokenizer = make(tokenizer, prompt_ids, stop)
    return made
