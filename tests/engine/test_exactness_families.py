"""Families with experts, sinks and windows: every drafter, alone and apart from its prefill in both hand-off modes,
changes no bit of them. MTP modules have layers of their family: see test_moe_parity, test_mimo and
test_exactness_deepseek."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.models.config import ModelSpec
from paceline.request import SequenceRequest
from tests.models.test_moe_parity import GLM, QWEN3
from tests.models.test_window_parity import GEMMA, OSS
from tests.support.exactness import Outcome, run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.parity import write_reference
from tests.support.proposed import proposed_by
from tests.support.tiny_model import tiny_request
from tests.support.untrained_heads import write_tiny_head

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    needs_kernels,
]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", QWEN3),
    "glm": ("Glm4Moe", GLM),
    "gemma": ("Gemma3", GEMMA | {"bos_token_id": 1, "eos_token_id": 2}),  # as the draft model has them
    "gpt-oss": ("GptOss", OSS),
}
HEADS = ("eagle", "eagle3", "medusa", "draft_model")
CHUNK = 7
DRAFTERS: dict[str, dict[str, object]] = {
    "ngram": {"num_draft_tokens": 4, "tree": "static", "tree_width": 3},
    "suffix": {"num_draft_tokens": 8},
    "trie": {"num_draft_tokens": 6, "tree": "static", "tree_nodes": 12},
    "lookahead": {"num_draft_tokens": 9, "tree": "static", "tree_nodes": 55},
    "eagle": {"num_draft_tokens": 3},
    "eagle3": {"num_draft_tokens": 3, "tree": "dynamic", "tree_width": 3},
    "medusa": {"num_draft_tokens": 3, "tree": "static"},
    "draft_model": {"num_draft_tokens": 3},
    "auto": {"num_draft_tokens": 4},
}


@dataclass(frozen=True)
class Family:
    """A random checkpoint, heads for it by drafter, and what it answers without drafts, caches and chunks."""

    folder: Path
    plain: list[Outcome]

    def config(self, **options: object) -> NodeConfig:
        common = {"model": str(self.folder), "dtype": "bf16", "kv_cache_tokens": 2048, "page_size": 4}
        return NodeConfig.model_validate(common | {"head_check": False} | options)

    def drafting(self, drafter: str, **options: object) -> NodeConfig:
        path = {"drafter_path": str(self.folder.parent / drafter)} if drafter in HEADS else {}
        return self.config(drafter=drafter, prefill_chunk_tokens=CHUNK, **path, **DRAFTERS[drafter], **options)


def requests() -> list[SequenceRequest]:
    return [tiny_request(index=i, max_tokens=12, temperature=0.7 * i) for i in range(2)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    kind, shape = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family") / "target"
    write_reference(folder, kind, shape)
    spec = ModelSpec.from_folder(folder)
    for name in HEADS:
        write_tiny_head(folder.parent / name, name, spec)
    made = Family(folder, [])
    made.plain.extend(run(build_runner(made.config(drafter="none", prefix_cache=False)), requests()))
    return made


def bits(outcomes: list[Outcome]) -> list[object]:
    return [(one.token_ids, one.logit_bits) for one in outcomes]


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_every_drafter_changes_no_bit(family: Family, drafter: str) -> None:
    """Alone in chunks and a batch, then apart; untrained heads are rarely right, so what they propose is compared."""
    config = family.drafting(drafter)
    alone = build_runner(config)
    assert alone.bit_exact
    proposed = proposed_by(alone)
    together = run(alone, requests(), batch=2, chunk_tokens=CHUNK)
    assert bits(together) == bits(family.plain)
    for handoff in ("draft_kv", "hidden_states") if drafter in HEADS else ():  # nothing of a lookup crosses
        config = family.drafting(drafter, handoff=handoff)
        decode = build_runner(config)
        apart = proposed_by(decode)
        async with pair(config, build_runner(config, decodes=False), decode) as nodes:
            assert bits([outcome for outcome, _ in await nodes.run(requests(), concurrent=2)]) == bits(family.plain)
            await nodes.all_released()
        assert sorted(apart) == sorted(proposed) != []
