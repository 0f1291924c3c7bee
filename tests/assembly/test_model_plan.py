"""``paceline plan``: real checkpoints as they announce themselves, every tensor taken once, of the published sizes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cluster.commands.cli import app
from paceline.assembly.model_plan import DRAFTER, ModelPlan, plan_model
from paceline.errors import ConfigError
from paceline.models.announced import read_announced
from tests.support.tiny_deepseek import ranks_deepseek_spec, write_folder

INDEXES = Path(__file__).parents[1] / "models" / "indexes"
# Tensors, KV bytes of a token in bf16, and the drafter.
PUBLISHED = {
    "llama-3.1-8b": (291, 32 * 2 * 8 * 128 * 2, "ngram"),
    "llama-3.1-70b": (723, 80 * 2 * 8 * 128 * 2, "ngram"),
    "deepseek-v3": (91_991, 61 * 576 * 2, "mtp"),
    "glm-4.5-air": (18_329, 46 * 2 * 8 * 128 * 2, "mtp"),
    "qwen3-30b-a3b": (18_867, 48 * 2 * 4 * 128 * 2, "ngram"),
    "gpt-oss-20b": (459, 24 * 2 * 8 * 64 * 2, "ngram"),
}
STORED = {
    "llama-3.1-8b": 2 * 8_030_261_248,
    "llama-3.1-70b": 2 * 70_553_706_496,
    "deepseek-v3": 688_574_839_360,
    "qwen3-30b-a3b": 61_064_245_248,
    "gpt-oss-20b": 13_761_264_768,
}
WIDTHS = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


def index(name: str) -> Path:
    return INDEXES / f"{name}.json"


@cache
def planned(name: str) -> ModelPlan:
    return plan_model(index(name), torch.bfloat16)


@pytest.mark.parametrize("name", PUBLISHED)
def test_real_indexes_load_with_no_tensor_left(name: str) -> None:
    tensors, token_bytes, drafter = PUBLISHED[name]
    plan = planned(name)
    assert (plan.num_tensors, plan.token_bytes, plan.drafter) == (tensors, token_bytes, drafter)
    assert plan.refusals == ()
    _, announced = read_announced(index(name))
    assert sum(t.num_elements * WIDTHS[t.dtype] for t in announced.values()) == STORED.get(name, 220_937_661_440)
    assert (plan.draft_token_bytes > 0) == (drafter == "mtp")
    plan.check_degree(4)
    assert plan.weight_bytes(4) < plan.weight_bytes() / 2


def test_a_gpu_unpacks_mxfp4() -> None:
    """A CPU has half a byte and a 32nd of a float16 for each weight of an expert. Mutant: the same on both."""
    on_gpu = plan_model(index("gpt-oss-20b"), torch.bfloat16, on_gpu=True)
    weights = 24 * 32 * 3 * 2880 * 2880
    assert on_gpu.weight_bytes() - planned("gpt-oss-20b").weight_bytes() == weights * (2 - 1 / 2 - 2 / 32)


def test_a_tensor_too_many_or_too_few_is_named(tmp_path: Path) -> None:
    raw = json.loads(index("qwen3-30b-a3b").read_text())
    raw["config"]["num_hidden_layers"] = 2
    name = "model.layers.{0-47}.self_attn.o_proj.weight"
    kept = [[n.replace("{0-47}", "{0-1}"), shape, dtype] for n, shape, dtype in raw["tensors"]]
    for tensors, said in (
        ([*kept, ["model.layers.1.extra.weight", [3], "BF16"]], r"does not know: model\.layers\.1\.extra\.weight"),
        (
            [t for t in kept if t[0] != name.replace("47", "1")],
            r"model\.layers\.0\.self_attn\.o_proj\.weight is missing",
        ),
        ([*kept, ["model.layers.1.odd", [3], "F4"]], r"odd is of type F4"),
        ([*kept, ["model.{0}.{0-1}", [3], "BF16"]], r"model\.\{0\}\.0, model\.\{0\}\.1$"),
        ([*kept, ["model.odd", [1 << 63], "BF16"]], r"bad shape"),
        ([*kept, ["model.{0-99999}.{0-99999}", [3], "BF16"]], r"more than 1000000"),
    ):
        (tmp_path / "index.json").write_text(json.dumps(raw | {"tensors": tensors}))
        with pytest.raises(ConfigError, match=said):
            plan_model(tmp_path / "index.json", torch.bfloat16)


def test_a_folder_by_its_headers(tmp_path: Path) -> None:
    """The sizes are those of the tensors that lie there, without the modules' copies of embedding and head, and with
    routers in float32."""
    folder = write_folder(tmp_path)
    plan = plan_model(folder, torch.bfloat16)
    _, announced = read_announced(folder)
    copies = [
        t for name, t in announced.items() if name.endswith(("3.embed_tokens.weight", "3.shared_head.head.weight"))
    ]
    copies += [t for n, t in announced.items() if n.endswith(("4.embed_tokens.weight", "4.shared_head.head.weight"))]
    stored = sum(t.num_elements * WIDTHS[t.dtype] for t in announced.values())
    routers = [t for name, t in announced.items() if name.endswith(".gate.weight")]
    wider = sum(2 * t.num_elements for t in routers)
    assert plan.weight_bytes() == stored + wider - sum(2 * t.num_elements for t in copies)
    assert {part.name for part in plan.parts} >= {"experts", "attention", DRAFTER}
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "hqq"}}
    (folder / "config.json").write_text(json.dumps(raw))
    assert "quant_method 'hqq'" in plan_model(folder, torch.bfloat16).refusals[0]


@pytest.mark.parametrize(
    ("name", "tp", "said"),
    [
        ("qwen3-30b-a3b", "16", "16 ranks do not fit a model of 32 heads, 4 KV heads, 128 experts, 8 slabs"),
        ("gpt-oss-20b", "3", "3 ranks do not fit"),
        ("gpt-oss-20b", "0", "0 ranks do not fit"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(name: str, tp: str, said: str) -> None:
    plan = planned(name)
    with pytest.raises(ConfigError) as refused:
        plan.check_degree(int(tp))
    assert said in refused.value.message


def test_a_rank_has_a_whole_kv_head_though_there_are_more_ranks_than_heads() -> None:
    """Mutant: the bytes are divided by the degree."""
    plan = planned("qwen3-30b-a3b")  # 4 KV heads
    plan.check_degree(8)
    assert planned("deepseek-v3").target_kv_bytes(8) == planned("deepseek-v3").token_bytes  # a latent is not cut
    assert [plan.target_kv_bytes(degree) for degree in (1, 2, 8)] == [plan.token_bytes // n for n in (1, 2, 4)]


def test_ranks_among_which_sequences_are_dealt_have_whole_attention(tmp_path: Path) -> None:
    """Mutants: attention is cut all the same; rank 0 has the drafter's KV of its own sequences alone."""
    folder = write_folder(tmp_path / "tiny", spec=ranks_deepseek_spec())
    plan = plan_model(folder, torch.bfloat16)
    heads = next(part for part in plan.parts if part.name == "attention")
    assert plan.dealt(8).weight_bytes(8) - plan.weight_bytes(8) == heads.num_bytes - heads.of_rank(8)
    assert plan.dealt(8).kv_bytes(8) == plan.token_bytes + 8 * plan.draft_token_bytes
    done = CliRunner().invoke(app, ["plan", str(folder), "--tp", "8", "--attention-dp", "4"])
    assert "4 pools are asked for, but 8 ranks (tp) can have 1 or 8" in str(done.exception)


def test_the_command() -> None:
    done = CliRunner().invoke(app, ["plan", str(index("glm-4.5-air")), "--tp", "8", "--context", "1000"])
    assert done.exit_code == 0, done.output
    assert "glm4_moe: " in done.output
    assert "MLPs of the first rank" in done.output  # 10944 and 1408 columns are not 8 runs of blocks of 32
    assert "63 pages of 16" in done.output
    assert "rank 0 of 8" in done.output
    assert "drafter default: auto (its heads: mtp)" in done.output
