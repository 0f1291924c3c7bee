"""The prompts of one request: checked before any of them runs, then asked of the router side by side.

Each prompt is a request of its own to the router, with the same options and the same seed. So its answer is the one
that it would get alone, however prompts are grouped. Choice j of prompt i is choice ``i * n + j`` of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from cluster.contract.generation import GenerationRequest, Prompt
from cluster.contract.plan import Plan, check_prompt, truncated
from cluster.frontdoor.openai_parse import ApiRequest
from paceline.errors import InvalidRequest, PacelineError
from paceline.results import Chunk, ModelInfo, Tokenization

PROMPTS_AT_ONCE = 8  # of one request
QUEUE_CHUNKS = 32  # of all its prompts together
MAX_PROMPT_VALUES = 2**19  # log-probabilities of prompts in an answer: 128 prompts of 2,048 tokens with one alternative


OnPlan = Callable[[int, Plan], None]  # a prompt's number, and what the router is to do for it


class Decoder(Protocol):
    """paceline.text.tokenizer.Tokenizer, as far as prompts need it."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""


class Asked(Protocol):
    """cluster.routing.router.Router, as far as prompts need it."""

    @property
    def tokenizer(self) -> Decoder: ...

    def generate(
        self, request: GenerationRequest, on_plan: Callable[[Plan], None] = ...
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks of all choices as they come. Closing it cancels the request. on_plan: called before the first."""

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """Token ids of a text or a chat."""

    def model_info(self) -> ModelInfo:
        """What is served and how."""


@dataclass(frozen=True)
class AskedPrompt:
    """One prompt of a request."""

    generation: GenerationRequest  # what the router is asked
    token_ids: tuple[int, ...] = ()  # known where the answer tells of the prompt, or there are several
    text: str = ""  # as the answer repeats it; known with echo


async def read_prompts(router: Asked, request: ApiRequest) -> tuple[AskedPrompt, ...]:
    """The prompts of a request. Where there are several, or the answer tells of them, they are tokenized and checked
    here. Raises InvalidRequest, which names ``prompt[i]`` where there are several."""
    asked = request.generations
    if len(asked) == 1 and not request.echo and request.generation.sampling.prompt_logprobs is None:
        return (AskedPrompt(request.generation),)
    found = []
    for i, generation in enumerate(asked):
        try:
            found.append(await _read(router, generation, request.echo))
        except InvalidRequest as error:
            raise _named(error, i, len(asked)) from None
        await asyncio.sleep(0)  # each costs some time of the event loop
    _check_values(request, sum(len(prompt.token_ids) for prompt in found))
    return tuple(found)


def _check_values(request: ApiRequest, num_tokens: int) -> None:
    """An answer is held as a whole: some 300 bytes for each value. num_tokens: of all prompts."""
    sampling = request.generation.sampling
    if sampling.prompt_logprobs is None:
        return
    values = num_tokens * sampling.n * (sampling.prompt_logprobs + 1)
    if values > MAX_PROMPT_VALUES:
        asked = f"{num_tokens} tokens, {sampling.n} choices, {sampling.prompt_logprobs} alternatives"
        raise InvalidRequest(
            "messages" if request.chat else "prompt",
            f"at most {MAX_PROMPT_VALUES} log-probabilities of prompts are told at once; {asked} make {values}",
        )


async def _read(router: Asked, generation: GenerationRequest, echo: bool) -> AskedPrompt:
    info = router.model_info()
    whole = (await router.tokenize(generation.prompt)).token_ids
    token_ids = truncated(whole, generation, info.max_model_len)
    check_prompt(token_ids, generation.prompt, info.max_model_len, info.vocab_size)
    if not isinstance(generation.prompt, str | tuple):  # a chat is more than its tokens
        return AskedPrompt(generation, token_ids)
    text = generation.prompt
    if echo and (not isinstance(text, str) or token_ids != whole):
        text = router.tokenizer.decode(token_ids)
    return AskedPrompt(replace(generation, prompt=token_ids), token_ids, text if isinstance(text, str) else "")


async def generate_all(router: Asked, prompts: Sequence[AskedPrompt], on_plan: OnPlan) -> AsyncGenerator[Chunk, None]:
    """Chunks of all choices of all prompts as they come, ``PROMPTS_AT_ONCE`` of them at once.
    on_plan: called before the first chunk of each prompt.

    Close it (``contextlib.aclosing``) to cancel every one. The first prompt that fails ends the others: raises what the
    router raises, and an InvalidRequest names ``prompt[i]`` where there are several.
    """
    if len(prompts) == 1:
        async with aclosing(router.generate(prompts[0].generation, partial(on_plan, 0))) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue(QUEUE_CHUNKS)
    left = iter(enumerate(prompt.generation for prompt in prompts))
    workers = [
        asyncio.create_task(_work(router, left, len(prompts), queue, on_plan))
        for _ in range(min(PROMPTS_AT_ONCE, len(prompts)))
    ]
    try:
        busy = len(workers)
        while busy:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                busy -= 1
            else:
                yield item
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _work(
    router: Asked,
    left: Iterator[tuple[int, GenerationRequest]],
    count: int,
    queue: asyncio.Queue[Chunk | Exception | None],
    on_plan: OnPlan,
) -> None:
    """Run prompts that are left, one after the other. Puts None at the end, or the error that ends them all."""
    i = 0
    try:
        for i, generation in left:
            async with aclosing(router.generate(generation, partial(on_plan, i))) as chunks:
                async for chunk in chunks:
                    await queue.put(replace(chunk, choice=i * generation.sampling.n + chunk.choice))
    except InvalidRequest as error:
        await queue.put(_named(error, i, count))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


def _named(error: InvalidRequest, index: int, count: int) -> PacelineError:
    """``error`` with the prompt that is wrong named by its place, where there are several."""
    if error.field != "prompt" or count == 1:
        return error
    return InvalidRequest(f"prompt[{index}]", error.message, error.code)
