"""From options to a drafter: ``default`` under its real name, thresholds of dynamic trees, heads read once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.speculation.drafter_specs import parse_drafters
from cluster.deployment import Deployment
from paceline.assembly.build import build_runner
from paceline.assembly.drafting import plan_drafter
from paceline.assembly.shipped import AUTO_TOKENS, resolve_drafter, with_real_drafter
from paceline.config import NodeConfig, ServeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.fingerprint import fingerprint_of
from paceline.engine_config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.base import TargetModel
from paceline.models.registry import load_target
from paceline.request import SequenceRequest, SpeculationParams
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.drafters.plan import DrafterPlan
from paceline.spec_decode.heads import detect as formats
from paceline.spec_decode.heads import shipped
from paceline.spec_decode.heads.formats.files import HeadFiles, open_head
from paceline.spec_decode.length.cost import CostTable
from paceline.speculation import DRAFTERS
from tests.support.exactness import run
from tests.support.head_files import at_layer, mtp_config, mtp_module, put
from tests.support.scripted_nodes import fleet
from tests.support.tiny_deepseek import write_folder
from tests.support.tiny_model import primary_of, tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

torch.set_num_threads(1)


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """EAGLE-3 heads as if they shipped for the model ``tiny``."""
    write_tiny_head(tmp_path / "tiny" / "eagle3", "eagle3")
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    return tmp_path


def asking(drafter: str | None) -> SequenceRequest:
    request = tiny_request()
    return SequenceRequest(
        "r", request.prompt_token_ids, request.params, speculation=SpeculationParams(None, None, drafter)
    )


def test_default_is_what_ships(heads: Path) -> None:
    """auto where there are heads: it drafts with them as far as that pays. Its K is its own unless one is asked for."""
    assert with_real_drafter(EngineConfig(model="tiny")).drafter == "auto"
    assert with_real_drafter(EngineConfig(model="/models/tiny")).selectable == ("auto",)
    assert with_real_drafter(EngineConfig(model="tiny")).num_draft_tokens == AUTO_TOKENS == 8
    assert with_real_drafter(EngineConfig(model="tiny", num_draft_tokens=4)).num_draft_tokens == 4
    assert with_real_drafter(EngineConfig(model="tiny", drafter="eagle3")).num_draft_tokens == 4
    other = with_real_drafter(ServeConfig(model="another", drafters="suffix,ngram"))
    assert isinstance(other, ServeConfig)
    assert other.selectable == ("ngram", "suffix")
    auto = EngineConfig(model="tiny", drafter="auto")
    assert with_real_drafter(auto).drafter == "auto"
    assert resolve_drafter(auto) == "eagle3"


def test_a_quantised_copy_has_the_heads_of_its_model(tmp_path: Path, heads: Path) -> None:
    """A fine-tuned one, which may name its model too, has not: it says other things."""
    for config, found in (
        ({"_name_or_path": "tiny", "quantization_config": {"quant_method": "fp8"}}, "eagle3"),
        ({"_name_or_path": "tiny"}, "ngram"),
        ({"_name_or_path": "..", "quantization_config": {"quant_method": "fp8"}}, "ngram"),
        ({"_name_or_path": ["tiny"], "quantization_config": {"quant_method": "fp8"}}, "ngram"),
        ({"_name_or_path": "tiny", "quantization_config": 8}, "ngram"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert resolve_drafter(EngineConfig(model=str(tmp_path), drafter="auto")) == found


def test_without_shipped_heads_it_is_the_modules_of_the_targets_own_checkpoint(tmp_path: Path, heads: Path) -> None:
    """Heads that ship come first; a checkpoint that has no modules, whatever its config.json says, has none."""
    folder = write_folder(tmp_path / "tiny-deepseek")
    asked = NodeConfig(model=str(folder), dtype="bf16", kv_cache_tokens=2048, max_model_len=256, head_check=False)
    auto = asked.model_copy(update={"drafter": "auto"})
    assert (with_real_drafter(asked).drafter, resolve_drafter(auto)) == ("auto", "mtp")
    plain = run(build_runner(asked.model_copy(update={"drafter": "none"})), [tiny_request(temperature=1.0)], batch=1)
    for config in (asked, auto):
        runner = build_runner(config)
        assert (runner.drafter.name, len(runner.drafter.kv_layers)) == ("mtp", 2)
        assert not runner.identity.drafter_weights.startswith("untrained")
        assert run(runner, [tiny_request(temperature=1.0)], batch=1)[0].token_ids == plain[0].token_ids
    write_tiny_head(heads / folder.name / "eagle3", "eagle3")
    assert (with_real_drafter(asked).drafter, resolve_drafter(auto)) == ("auto", "eagle3")
    target_only = {n: t for n, t in load_file(folder / "model.safetensors").items() if "enorm" not in n}
    save_file(target_only, folder / "model.safetensors")
    shutil.rmtree(heads / folder.name / "eagle3")
    assert with_real_drafter(asked).drafter == resolve_drafter(auto) == "ngram"


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "medusa", "mtp"])
def test_default_with_a_folder_is_what_the_folder_holds(drafter: str, tmp_path: Path) -> None:
    if drafter == "mtp":
        put(tmp_path, at_layer(2, mtp_module()), mtp_config(2))
    else:
        write_tiny_head(tmp_path, drafter)
    config = EngineConfig(drafter_path=str(tmp_path))
    assert (with_real_drafter(config).drafter, resolve_drafter(config)) == ("auto", drafter)


def test_a_folder_without_heads_is_refused_when_the_deployment_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        Deployment(ServeConfig(drafter_path=str(tmp_path)))
    assert refused.value.key == "drafter_path"


async def test_router_requests_and_nodes_call_it_by_one_name(heads: Path) -> None:
    deployment = Deployment(ServeConfig(model="tiny", drafters="suffix"))
    assert deployment.config.node(1).drafter == "auto"
    options = deployment.config.model_dump(include={"drafter", "drafters"})
    async with fleet(**options) as made:
        info = made.router.model_info()
        assert (info.drafter, info.drafters) == ("auto", ("auto", "suffix"))
        assert made.router.served.drafters == info.drafters
    runner = tiny_runner(drafter="default", drafters="suffix")
    assert fingerprint_of(runner).drafter == runner.drafter.name == "eagle3"
    for asked, drafted in (("eagle3", {"eagle3"}), ("suffix", {"suffix"}), (None, set(DRAFTERS))):
        (done,) = ColocatedEngine(runner).generate([asking(asked)])
        assert set(done.stats.rounds_by_drafter) <= drafted


# ---- thresholds of dynamic trees


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "mtp"])
def test_expand_above_reaches_the_drafter_and_no_text(drafter: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tree": "dynamic", "num_draft_tokens": 4, "tree_width": 3}
    if drafter != "mtp":
        write_tiny_head(tmp_path / drafter, drafter)
        options["drafter_path"] = str(tmp_path / drafter)
    requests = [tiny_request(index=i, temperature=float(i % 2)) for i in range(4)]
    plain = run(tiny_runner("bf16", drafter="none"), requests, batch=2)
    drafted = {}
    for above in (0.0, 0.001, 1.0):
        runner = tiny_runner("bf16", drafter=drafter, expand_above=above, **options)
        made = primary_of(runner)
        assert isinstance(made, FeatureDrafter)
        assert made.expand_above == (above or None)
        engine = ColocatedEngine(runner)
        drafted[above] = engine.generate([tiny_request()])[0].stats.drafted_per_position
        for got, expected in zip(run(runner, requests, batch=2), plain, strict=True):
            assert (got.token_ids, got.logit_bits) == (expected.token_ids, expected.logit_bits)
    assert len(drafted[0.001]) > 1
    assert len(drafted[1.0]) == 1  # nothing is that sure: one level


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafter": "ngram", "tree": "dynamic"}, "not of --drafter ngram"),
        ({"drafter": "mtp", "mtp_modules": 2, "tree": "dynamic"}, "chained"),
    ],
)
def test_expand_above_of_drafters_that_grow_no_such_trees(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        tiny_runner(expand_above=0.1, **options)
    assert refused.value.key == "expand_above"


def test_expand_above_needs_dynamic_trees() -> None:
    with pytest.raises(ValueError, match="set tree to dynamic"):
        NodeConfig(drafter="mtp", expand_above=0.1)


def test_the_benchmarks_take_it_too() -> None:
    run_ = parse_drafters("mtp:tree=dynamic,above=0.1")[1]
    assert run_.config("any").expand_above == 0.1


# ---- heads from disk


@pytest.mark.parametrize("drafter", ["eagle", "eagle3"])
def test_a_heads_folder_is_read_once(drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_head(tmp_path / drafter, drafter)
    opened: list[Path] = []

    def counted(folder: Path) -> HeadFiles:
        opened.append(folder)
        return open_head(folder)

    monkeypatch.setattr(formats, "open_head", counted)
    tiny_runner(drafter=drafter, drafter_path=str(tmp_path / drafter))
    assert opened == [tmp_path / drafter]


def test_heads_of_another_kind_are_refused(tmp_path: Path) -> None:
    for name in ("eagle", "eagle3", "medusa"):
        write_tiny_head(tmp_path / name, name)
    for drafter, holds in (("eagle", "eagle3"), ("eagle3", "eagle"), ("eagle3", "medusa")):
        with pytest.raises(ConfigError, match=r"another kind|medusa weights"):
            tiny_runner(drafter=drafter, drafter_path=str(tmp_path / holds))
    shutil.rmtree(tmp_path / "eagle")
    with pytest.raises(ConfigError, match="is not a folder"):
        tiny_runner(drafter="eagle", drafter_path=str(tmp_path / "eagle"))


# ---- where MTP modules come from


def _mtp_plan(target: TargetModel, model: str, **options: Any) -> DrafterPlan:
    config = EngineConfig(model=model, drafter="mtp", **options)
    return plan_drafter(config, target, CostTable.assumed(0.02))


def test_mtp_modules_of_the_targets_own_checkpoint(tmp_path: Path) -> None:
    """Nobody who serves DeepSeek-V3 should have to name its folder twice."""
    folder = write_folder(tmp_path)
    target = load_target(folder, torch.bfloat16, torch.device("cpu"))
    own = _mtp_plan(target, str(folder))
    given = _mtp_plan(target, str(folder), drafter_path=str(folder))
    assert own.digest == given.digest
    assert len(own.kv_layers) == 2


def test_as_many_mtp_modules_as_asked_for_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    put(tmp_path / "tiny" / "mtp", at_layer(2, mtp_module()), mtp_config(2))
    target = tiny_runner(drafter="none").model
    assert not _mtp_plan(target, "tiny").digest.startswith("untrained")
    three = _mtp_plan(target, "tiny", mtp_modules=3)
    assert three.digest.startswith("untrained")  # one module is not a third of three
    assert len(three.kv_layers) == 3
    put(
        tmp_path / "tiny" / "mtp3",
        at_layer(2, mtp_module()) | at_layer(3, mtp_module()),
        mtp_config(2, num_nextn_predict_layers=2),
    )
    assert not _mtp_plan(target, "tiny", mtp_modules=3).digest.startswith("untrained")
