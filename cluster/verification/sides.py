"""Who is asked: a deployment over gRPC, one plain process without a drafter, or the answers of a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cluster.contract import public_wire
from cluster.contract.plan import Plan, ServedModel, make_plan
from cluster.contract.text_source import text_source
from cluster.contract.tools import answer_style
from cluster.routing.choice import ChoiceRun
from cluster.verification.answers import About, Answer
from cluster.verification.asked import Asked, CannotCompare
from paceline.answer_wire import generate_response
from paceline.client import AsyncClient, ModelInfo
from paceline.client.convert import generate_request, generation
from paceline.config import NodeConfig, ServeConfig
from paceline.errors import InvalidRequest, PacelineError
from paceline.parsing.parser import make_parser
from paceline.request import SpeculationParams
from paceline.results import Generation, choices_of

if TYPE_CHECKING:
    from paceline.engine.colocated import Completed

ROOM_TOKENS = 64  # of the plain process, beyond its longest answer
NOTHING_DRAFTED = SpeculationParams(num_draft_tokens=0)  # nor what a grammar forces


class Side(Protocol):
    """One that answers."""

    name: str
    about: About

    async def answer(self, asked: Asked, extra: Mapping[str, Any]) -> list[Answer] | None:
        """All choices, by index. extra: options over those of the request. None: this side has no answer to it.
        Raises CannotCompare."""


class Deployed:
    """A deployment."""

    def __init__(self, name: str, client: AsyncClient, info: ModelInfo) -> None:
        self.name, self.info, self._client = name, info, client
        self.about = About(
            info.model,
            info.vocab_size,
            info.system_fingerprint,
            info.weights,
            info.kernels,
            info.dtype,
            info.bit_exact,
        )

    @classmethod
    async def reach(cls, name: str, client: AsyncClient) -> Deployed:
        """Ask what it serves. Raises CannotCompare where it does not say."""
        try:
            return cls(name, client, await client.model_info())
        except PacelineError as error:
            raise CannotCompare(f"{name} does not answer: {error}") from None

    async def has_chats(self) -> bool:
        """Whether its model has a chat template."""
        try:
            await self._client.tokenize([{"role": "user", "content": "Hello"}])
        except PacelineError:
            return False
        return True

    async def answer(self, asked: Asked, extra: Mapping[str, Any]) -> list[Answer]:
        """See Side."""
        options: Any = {**asked.options, **extra}
        try:
            done = await self._client.generate(asked.prompt, **options)
        except PacelineError as error:
            verb = "refuses" if isinstance(error, InvalidRequest) else "does not answer"
            raise CannotCompare(f"{self.name} {verb} {asked.told}: {error}") from None
        return [Answer.of(choice) for choice in done.choices]


class FromFile:
    """Answers that were recorded with their requests."""

    def __init__(self, name: str, about: About) -> None:
        self.name, self.about = name, about

    async def answer(self, asked: Asked, extra: Mapping[str, Any]) -> list[Answer] | None:
        """See Side: what was recorded, whatever ``extra`` asks for."""
        return None if asked.recorded is None else list(asked.recorded.answers)


class Plain:
    """One process: no drafter, no prefix cache, no hand-off, one sequence at a time."""

    def __init__(self, folder: Path, info: ModelInfo) -> None:
        """folder: of the model. info: of the deployment that is compared, for its limits and number format."""
        from paceline.text.tokenizer import Tokenizer

        self.name = "the plain process"
        self._folder, self._info = folder, info
        self._tokenizer = Tokenizer.from_folder(folder)
        config = ServeConfig(model=str(folder), drafter="none")
        style = answer_style(config, self._tokenizer.template)
        self._served = ServedModel(info.model, info.max_model_len, info.vocab_size, ("none",), config, style)
        self._alone = asyncio.Lock()
        self.about = About(folder.name)

    async def load(self, all_asked: Sequence[Asked]) -> None:
        """Load the model, with room for the longest of the requests. Raises CannotCompare."""
        plans = [await self._plan(asked, {}) for asked in all_asked]
        longest = max(plan.num_tokens // len(plan.sequences) for plan in plans)
        try:
            await asyncio.to_thread(self._load, longest + ROOM_TOKENS)
        except PacelineError as error:
            raise CannotCompare(f"{self.name}: {error}") from None

    def _load(self, kv_tokens: int) -> None:
        from paceline.assembly.build import build_runner
        from paceline.engine.colocated import ColocatedEngine

        options = {"model": str(self._folder), "dtype": self._info.dtype, "kv_cache_tokens": kv_tokens}
        fixed = {"drafter": "none", "prefix_cache": False, "head_check": False}
        runner = build_runner(NodeConfig.model_validate(options | fixed))
        identity = runner.identity
        self._engine = ColocatedEngine(runner, max_running=1)
        self.about = About(
            self._folder.name,
            runner.vocab_size,
            weights=identity.weights,
            kernels=identity.kernels,
            dtype=self._info.dtype,
            bit_exact=identity.bit_exact,
        )

    async def _plan(self, asked: Asked, extra: Mapping[str, Any]) -> Plan:
        options = {**asked.options, **extra, "model": None}
        try:
            request = public_wire.generation_request(generate_request(asked.prompt, options))
            return await make_plan(replace(request, speculation=NOTHING_DRAFTED), self._served, self._tokenizer)
        except PacelineError as error:
            raise CannotCompare(f"{self.name} refuses {asked.told}: {error}") from None

    async def answer(self, asked: Asked, extra: Mapping[str, Any]) -> list[Answer]:
        """See Side."""
        plan = await self._plan(asked, extra)
        async with self._alone:
            try:
                return await asyncio.to_thread(self._answer, plan)
            except PacelineError as error:
                raise CannotCompare(f"{self.name} refuses {asked.told}: {error}") from None

    def _answer(self, plan: Plan) -> list[Answer]:
        runs = [self._run(plan, index) for index in range(len(plan.sequences))]
        choices = choices_of(chunk for run in runs for chunk in run)
        message = generate_response(Generation(plan.request_id, self._info.model, choices))
        # As a client gets it: messages have numbers of single precision.
        return [Answer.of(choice) for choice in generation(message).choices]

    def _run(self, plan: Plan, index: int) -> list[Any]:
        """One choice: the router's own part of it, over the tokens of the engine."""
        sequence, form = plan.sequences[index], plan.admitted.answer_format
        source = text_source(self._tokenizer, plan.admitted)
        text = _detokenizer(source, sequence.prompt_token_ids, plan.stop)
        parser = None if form is None else make_parser(form, sequence.prompt_token_ids, sequence.params.seed or 0)
        run = ChoiceRun(index, plan.request_id, sequence, text, time.monotonic(), True, parser)
        run.end_by_tokens()
        chunks = []
        if run.finish_reason is None:
            (done,) = self._engine.generate([run.for_nodes()])
            chunks = _taken(run, done)
        return [*chunks, run.complete()]


def _taken(run: ChoiceRun, done: Completed) -> list[Any]:
    assert done.finish_reason is not None
    chunks = []
    if run.wants_prompt_logprobs:
        chunks.append(run.take_prompt_logprobs(1, done.prompt_logprobs))
    chunks.append(run.take(0, done.token_ids, done.logprobs, ()))
    run.end(done.finish_reason)
    return [chunk for chunk in chunks if chunk is not None]


def _detokenizer(source: Any, prompt_ids: Sequence[int], stop: Sequence[str]) -> Any:
    from paceline.text.tokenizer import IncrementalDetokenizer

    return IncrementalDetokenizer(source, prompt_ids, stop)


def same_model(first: Side, other: Side) -> None:
    """Raise CannotCompare where the two do not serve one model: other weights of it are compared, and show."""
    for what, one, two in (
        ("model", _model_name(first.about.model), _model_name(other.about.model)),
        ("vocab_size", first.about.vocab_size, other.about.vocab_size),
        ("dtype", first.about.dtype, other.about.dtype),
    ):
        if one and two and one != two:
            raise CannotCompare(f"{what} is {one} at {first.name} and {two} at {other.name}: not comparable")


def _model_name(model: str) -> str:
    """Without the folders above it and the commit, which differ between hosts and versions."""
    return Path(model).name.partition("@")[0]
