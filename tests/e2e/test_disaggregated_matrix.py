"""The exactness matrix with prefill and decode apart: every drafter that has state to hand over, on the real model.

The same mixed batches and the same plain answers as tests/engine/test_exactness_matrix.py, over the real hand-off:
gRPC and gloo, chunks of a prompt, pages of another size on either side.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.layout import LayerOwner
from paceline.speculation import is_weightless
from paceline.v1.node_pb2 import HandedOff
from tests.support.exactness_matrix import CASES, Case, Cell, Matrix, Watch, half_cross, matrix, over_budget, unload
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.real_weights import Weights

pytestmark = [needs_kernels, pytest.mark.real_model, pytest.mark.timeout(600)]

# One of each state that crosses: modules have that of one, and what chooses among drafters is below.
STATEFUL = ("medusa", "eagle", "eagle3", "mtp x3", "draft model")
ADAPTS = ("auto", "several")  # the hand-off knows nothing of lengths: those that choose most
BUSY = 8  # requests in flight, of 11: later ones join a running batch


@pytest.fixture(scope="session", autouse=True)
def unloaded_at_the_end() -> Iterator[None]:
    """After its tests and those of tests/engine/test_exactness_matrix.py, which follow in one worker, fp32 first."""
    yield
    unload()


@pytest.fixture(scope="module")
def weights(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(smollm2_folder, tmp_path_factory.getbasetemp() / "matrix_weights")


@pytest.mark.parametrize("name", STATEFUL)
async def test_bf16_fixed_lengths(name: str, smollm2_folder: Path, weights: Weights) -> None:
    cells = half_cross(CASES[name], parity=0, max_tokens=12)
    assert await faults(matrix(smollm2_folder, "bf16"), weights, CASES[name], cells, adaptive="off") == []


@pytest.mark.parametrize("name", ADAPTS)
async def test_bf16_adaptive_lengths(name: str, smollm2_folder: Path, weights: Weights) -> None:
    cells = half_cross(CASES[name], parity=1, max_tokens=12)
    assert await faults(matrix(smollm2_folder, "bf16"), weights, CASES[name], cells, adaptive="window") == []


async def test_fp32(smollm2_folder: Path, weights: Weights) -> None:
    """The drafter with the most state: hidden rows and draft KV of three modules."""
    cells = half_cross(CASES["mtp x3"], parity=0, max_tokens=12)
    assert await faults(matrix(smollm2_folder, "fp32"), weights, CASES["mtp x3"], cells, adaptive="off") == []


async def faults(target: Matrix, weights: Weights, case: Case, cells: list[Cell], **options: object) -> list[str]:
    """Cells that differ from the plain answer, draft what they did not ask for, whose state did not cross, or that do
    not draft from it."""
    config = target.config_of(
        case, weights, tree="dynamic", prefill_chunk_tokens=10, max_running=BUSY, kv_cache_tokens=2048, **options
    )
    prefill, decode = target.runner(config), target.runner(config.model_copy(update={"page_size": 16}))
    watch = Watch(decode)
    async with pair(config, prefill, decode) as nodes:
        pairs = await nodes.run([target.request(cell) for cell in cells], concurrent=BUSY)
        await nodes.all_released()
    answers = watch.answers(cells, [outcome for outcome, _ in pairs])
    found = [f"{cell} differs from plain" for cell in target.differing(cells, answers)]
    found += [f"{cell} drafts what it did not ask for" for cell in over_budget(cells, answers, named=bool(case.named))]
    crossed = [answer.handed_off for _, answer in pairs]
    lacking = [c for c, sent in zip(cells, crossed, strict=True) if not sent or not complete(c, sent, decode)]
    found += [f"the state of {cell.name} did not cross" for cell in lacking]
    if case.drafter != "auto" and not case.named:  # these find something to draft in every state that arrives
        silent = [c for c, a in zip(cells, answers, strict=True) if c.num_draft_tokens and not a.stats.draft_tokens]
        found += [f"{cell.name} drafts nothing" for cell in silent]
    return found


def complete(cell: Cell, sent: HandedOff, decode: ModelRunner) -> bool:
    """As many draft rows crossed as target rows, and none for a drafter that has no use for them."""
    width = {owner: decode.kv.layout.token_bytes(owner) for owner in LayerOwner}
    if is_weightless(cell.drafter):
        return sent.bytes.draft_kv == 0
    return sent.bytes.draft_kv * width[LayerOwner.TARGET] == sent.bytes.target_kv * width[LayerOwner.DRAFT]
