"""GGUF files of models with experts: each expert's numbers against gguf's own reader, whole models against
transformers, exactness, and files that do not fit themselves."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from safetensors.torch import save_file

from paceline.assembly.build import build_runner
from paceline.assembly.selfcheck import logits_in_chunks
from paceline.config import NodeConfig
from paceline.errors import ConfigError
from paceline.layers.build import load_kernels
from paceline.layers.quantized import QuantizedWeight
from paceline.models import hub
from paceline.models.config import ModelSpec
from paceline.models.gguf.convert import convert
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.matrices import weight_of_blocks
from paceline.models.gguf.tensors import GgufTensors
from paceline.models.gpt_oss import GroupedClampedExperts, NamedExperts, SeparateClampedExperts
from paceline.models.loader import LazyTensors
from paceline.models.moe_config import MAX_EXPERTS
from paceline.models.registry import load_target, open_checkpoint
from paceline.models.weight_files import weight_files
from paceline.ranks.follower import Follower
from paceline.ranks.shard import Shard
from paceline.ranks.weights import ShardTensors
from tests.models.quantization.test_checkpoints import TOKENS, logits
from tests.support.exactness import run
from tests.support.gguf_experts import EXPERTS, LAYERS, USED, Fields, write_gpt_oss, write_qwen3moe
from tests.support.gguf_files import DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, WIDE
from tests.support.needs import needs_kernels
from tests.support.thread_ranks import ranks_runner
from tests.support.tiny_model import tiny_request

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
READER = "paceline.models.gguf.tensors.weight_of_blocks"
KINDS = [Kind.F16, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K]
YARN: dict[str, str | float | int] = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {  # what the file is, by hand
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * WIDE,
    "moe_intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_experts": EXPERTS,
    "num_experts_per_tok": USED,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
STRETCHED = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own; the kernels stay where they are compiled."""
    load_kernels()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def theirs(folder: Path, family: str, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of TOKENS by transformers' class of ``family`` with ``weights``, float32."""
    import transformers

    made = getattr(transformers, f"{family}Config")(**config)
    made.save_pretrained(folder)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    reference = getattr(transformers, f"{family}ForCausalLM").from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        found: torch.Tensor = reference.eval()(torch.tensor([TOKENS])).logits[0]
    return found


def check_logits(folder: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of transformers where products take inputs as they are. Inputs in int8 change a row's experts over
    where two scores nearly tie, so most rows are near."""
    assert expected.std() > 0.3  # the comparison is of something
    rows = (logits(folder) - expected).norm(dim=1) / expected.norm(dim=1)
    assert rows.median() < 0.05
    monkeypatch.setattr(READER, lambda *blocks: replace(weight_of_blocks(*blocks), int8_activations=False))
    assert ((logits(folder) - expected).norm() / expected.norm()).item() < 1e-4  # 2.5e-5 on an AMD


def check_drafts_batches_and_chunks(file: Path) -> None:
    """With copied drafts, neither a batch of three nor chunks of five change a token or a bit of its logits."""
    requests = [tiny_request(index=i, max_tokens=12, temperature=0.7 * i) for i in range(3)]
    options = {"model": str(file), "dtype": "bf16", "kv_cache_tokens": 1024, "head_check": False}
    plain = run(build_runner(NodeConfig.model_validate(options | {"drafter": "none"})), requests)
    drafted = {"drafter": "ngram", "num_draft_tokens": 6}
    for how in ({"batch": 3}, {"chunk_tokens": 5}):
        runner = build_runner(NodeConfig.model_validate(options | drafted))
        assert runner.bit_exact
        got = run(runner, requests, **how)
        assert [(o.token_ids, o.logit_bits) for o in got] == [(p.token_ids, p.logit_bits) for p in plain]


def written_folder(file: Path, folder: Path) -> LazyTensors:
    """The file as a folder of Hugging Face's; its tensors, float32."""
    folder.mkdir()
    convert(file, folder, lambda what, share: None)
    return LazyTensors(weight_files(folder), torch.float32)


def check_ranks(file: Path) -> None:
    """Two ranks have the bits of one."""
    folder = hub.resolve_model(str(file))
    spec, weights, seen = ModelSpec.from_folder(folder), open_checkpoint(folder, torch.bfloat16), []
    for degree in (1, 2):
        runner = ranks_runner(degree, spec, "bf16", Follower, weights, drafter="none", max_model_len=128)
        seen.append(logits_in_chunks(runner.model, runner.kv, runner.allocator, runner.attention, TOKENS, (9, 3)))
        runner.close()
    assert torch.equal(*seen)


@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_is_its_slice_of_the_file(kind: Kind, tmp_path: Path) -> None:
    """Mutants: gate's experts for up's, and the next expert's slice."""
    meant = write_qwen3moe(tmp_path / "tiny.gguf", kind, down=Kind.Q8_0)
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    moe = ModelSpec.from_folder(folder).moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (EXPERTS, USED, WIDE)
    assert (moe.normalise, moe.softmax, moe.dense_layers) == (True, True, ())
    found = open_checkpoint(folder, torch.float32)
    assert set(found) == set(meant)
    for name, weight in meant.items():
        mine = found[name]
        in_codes = len(weight.shape) == 2 and "mlp.gate." not in name and (kind is not Kind.F16 or "down" in name)
        assert isinstance(mine, QuantizedWeight) == in_codes, name
        mine = mine.dequantised() if isinstance(mine, QuantizedWeight) else mine
        assert mine.shape == weight.shape
        assert torch.allclose(mine, weight, rtol=1e-6, atol=1e-6), name


def test_no_other_experts_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: all experts are decoded for each."""
    write_qwen3moe(tmp_path / "tiny.gguf", Kind.Q4_K)
    file, seen = GgufFile(tmp_path / "tiny.gguf"), []

    def noted(rows: npt.NDArray[np.uint8], kind: Kind) -> QuantizedWeight:
        seen.append(rows.nbytes)
        return weight_of_blocks(rows, kind)

    monkeypatch.setattr(READER, noted)
    stored = GgufTensors(file, torch.bfloat16)
    assert not seen
    assert stored[f"model.layers.1.mlp.experts.{EXPERTS - 1}.up_proj.weight"].shape == (WIDE, HIDDEN)
    assert seen == [file.tensors["blk.1.ffn_up_exps.weight"].num_bytes // EXPERTS]


@needs_kernels
@pytest.mark.parametrize("fields", [{}, YARN, {"expert_weights_norm": False}], ids=["plain", "yarn", "not normalised"])
def test_floats_give_the_logits_of_transformers(
    fields: Fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: the router's rows in another order, weights of the chosen experts not normalised, gate and up changed
    over."""
    meant = write_qwen3moe(tmp_path / "tiny.gguf", Kind.F16, fields)
    config = QWEN3_MOE | ({"rope_parameters": STRETCHED} if "rope.scaling.type" in fields else {})
    if "expert_weights_norm" in fields:
        config["norm_topk_prob"] = False
    expected = theirs(tmp_path / "theirs", "Qwen3Moe", config, meant)
    check_logits(hub.resolve_model(str(tmp_path / "tiny.gguf")), expected, monkeypatch)


@needs_kernels
@pytest.mark.parametrize(("kind", "down"), [(Kind.Q8_0, None), (Kind.Q4_K, Kind.Q6_K), (Kind.Q6_K, None)])
def test_codes_give_the_logits_of_transformers(
    kind: Kind, down: Kind | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: as for floats."""
    meant = write_qwen3moe(tmp_path / "tiny.gguf", kind, down=down)
    expected = theirs(tmp_path / "theirs", "Qwen3Moe", QWEN3_MOE, meant)
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    check_logits(folder, expected, monkeypatch)


@needs_kernels
@pytest.mark.parametrize(("kind", "down"), [(Kind.Q4_K, Kind.Q6_K), (Kind.F16, None)])
def test_drafts_batches_and_chunks_change_no_bit(kind: Kind, down: Kind | None, tmp_path: Path) -> None:
    write_qwen3moe(tmp_path / "tiny.gguf", kind, down=down)
    check_drafts_batches_and_chunks(tmp_path / "tiny.gguf")


def test_ranks_have_their_own_experts(tmp_path: Path) -> None:
    """And give the same bits together as one alone."""
    write_qwen3moe(tmp_path / "tiny.gguf", Kind.Q4_K)
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    spec, weights = ModelSpec.from_folder(folder), open_checkpoint(folder, torch.bfloat16)
    names = {name.split(".")[5] for name in ShardTensors(weights, Shard(spec, 2, 1)) if ".experts." in name}
    assert names == {str(expert) for expert in range(EXPERTS // 2, EXPERTS)}
    check_ranks(tmp_path / "tiny.gguf")


@needs_kernels
def test_a_whole_folder_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meant = write_qwen3moe(tmp_path / "tiny.gguf", Kind.F16)
    folder = tmp_path / "folder"
    written = written_folder(tmp_path / "tiny.gguf", folder)
    assert set(written) == set(meant)
    for name, weight in meant.items():
        assert torch.equal(written[name], weight.bfloat16().float()), name
    rounded = {name: weight.bfloat16().float() for name, weight in meant.items()}
    check_logits(folder, theirs(tmp_path / "theirs", "Qwen3Moe", QWEN3_MOE, rounded), monkeypatch)


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"expert_count": MAX_EXPERTS + 1}, f"expert_count is {MAX_EXPERTS + 1}, expected 2 to"),
            ({"expert_count": 1}, "expert_count is 1, expected 2 to"),
            ({"expert_count": "many"}, "expert_count is 'many'"),
            ({"expert_count": 0}, "expert_count is 0"),
            ({"expert_used_count": EXPERTS + 1}, f"expert_used_count is {EXPERTS + 1} of {EXPERTS} experts"),
            ({"expert_used_count": 0}, "expert_used_count is 0"),
            ({"expert_feed_forward_length": 0}, "expert_feed_forward_length is 0"),
            ({"expert_gating_func": 2}, "expert_gating_func 2 is not supported"),
            ({"expert_weights_scale": 2.5}, "expert_weights_scale 2.5 is not supported"),
            ({"expert_shared_count": 1}, "expert_shared_count 1 is not supported"),
            ({"leading_dense_block_count": 1}, "leading_dense_block_count 1"),
            ({"attention.sliding_window": 64}, "sliding windows are not supported in GGUF files of qwen3moe"),
            ({"rope.freq_base": 1.0}, "freq_base is 1.0, expected more than 1"),
            (YARN | {"rope.scaling.factor": 0.0}, "factor is 0.0, expected 1 or more"),
            (YARN | {"rope.scaling.yarn_attn_factor": 1.0}, "yarn_attn_factor 1.0 is not supported"),
            (YARN | {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is not 1"),
            ({"rope.scaling.type": "yarn"}, "scaling.factor is None"),
        ],
    )
    def test_by_its_fields(self, change: Fields, named: str, tmp_path: Path) -> None:
        write_qwen3moe(tmp_path / "tiny.gguf", Kind.Q8_0, change)
        with pytest.raises(ConfigError, match=named):
            hub.resolve_model(str(tmp_path / "tiny.gguf"))

    @pytest.mark.parametrize(
        ("fields", "shapes", "named"),
        [
            ({"expert_count": EXPERTS + 1}, {}, r"has shape \(4, 256, 256\), expected 5 experts"),
            ({"expert_count": EXPERTS - 1}, {}, "expected 3 experts"),
            ({}, {"ffn_up_exps": (EXPERTS, HIDDEN)}, r"has shape \(4, 256\), expected 4 experts"),
            ({}, {"ffn_down_exps": (EXPERTS - 1, HIDDEN, WIDE)}, "expected 4 experts"),
            ({}, {"ffn_gate": (WIDE, HIDDEN)}, "ffn_gate.weight is not one of the architecture qwen3moe"),
            ({}, {"ffn_up_shexp": (WIDE, HIDDEN)}, "ffn_up_shexp.weight is not one of the architecture qwen3moe"),
        ],
    )
    def test_by_its_tensors(
        self, fields: Fields, shapes: dict[str, tuple[int, ...]], named: str, tmp_path: Path
    ) -> None:
        write_qwen3moe(tmp_path / "tiny.gguf", Kind.Q8_0, fields, shapes=shapes)
        with pytest.raises(ConfigError, match=named):
            open_checkpoint(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.float32)

    @pytest.mark.parametrize(
        ("fields", "left_out", "shapes", "named"),
        [
            ({}, "ffn_up_exps", {}, "model.layers.1.mlp.experts.0.up_proj.weight is missing"),
            ({}, "ffn_gate_inp", {}, "model.layers.1.mlp.gate.weight is missing"),
            ({"expert_feed_forward_length": WIDE // 2}, "", {}, r"has shape \(256, 256\), expected \(128, 256\)"),
            ({}, "", {"ffn_gate_inp": (EXPERTS + 1, HIDDEN)}, r"has shape \(5, 256\), expected \(4, 256\)"),
            ({}, "", {"ffn_up_exps": (EXPERTS, HIDDEN, 2 * WIDE)}, r"has shape \(256, 512\), expected"),
        ],
    )
    def test_when_it_is_loaded(
        self, fields: Fields, left_out: str, shapes: dict[str, tuple[int, ...]], named: str, tmp_path: Path
    ) -> None:
        write_qwen3moe(tmp_path / "tiny.gguf", Kind.Q8_0, fields, left_out=left_out, shapes=shapes)
        folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
        with pytest.raises(ConfigError, match=named):
            load_target(folder, torch.float32, torch.device("cpu"))

    def test_numbers_that_lie(self, tmp_path: Path) -> None:
        """Mutant: as many weights as ``expert_count`` says are listed before the tensors are looked at."""
        write_qwen3moe(tmp_path / "good.gguf", Kind.Q8_0)
        good = (tmp_path / "good.gguf").read_bytes()
        header = GgufFile(tmp_path / "good.gguf").tensors["token_embd.weight"].offset
        fields = good.index(b"qwen3moe.context_length"), good.index(b"tokenizer.ggml.model")
        infos = good.index(b"token_embd.weight"), header
        dice, refused = random.Random(7), 0
        for i in range(200):
            data, (low, high) = bytearray(good), infos if i % 2 else fields
            at = dice.randrange(low, high - 8)
            data[at : at + 4] = struct.pack("<I", dice.choice([0, 1, 1 << 14, 1 << 31, (1 << 32) - 1]))
            (tmp_path / "bad.gguf").write_bytes(data)
            try:
                stored = GgufTensors(GgufFile(tmp_path / "bad.gguf"), torch.bfloat16)
                assert len(stored) < 100
            except ConfigError:
                refused += 1
        assert refused > 50


GPT_OSS: dict[str, Any] = {  # what the file is, by hand
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": USED,
    "sliding_window": 5,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "attention_bias": True,
    "rope_parameters": STRETCHED | {"rope_theta": 150000.0, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
}


def all_in_one(meant: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a gpt-oss as transformers has them: of all experts together, [experts, in, out], gate and up by
    turns."""
    found = {name: weight for name, weight in meant.items() if ".experts." not in name}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"

        def every(part: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack([meant[f"{prefix}.{expert}.{part}"] for expert in range(EXPERTS)])

        for part, name in (("weight", "gate_up_proj"), ("bias", "gate_up_proj_bias")):
            found[f"{prefix}.{name}"] = torch.stack((every(f"gate_proj.{part}"), every(f"up_proj.{part}")), 2).flatten(
                1, 2
            )
        found[f"{prefix}.gate_up_proj"] = found[f"{prefix}.gate_up_proj"].transpose(1, 2)
        found[f"{prefix}.down_proj"] = every("down_proj.weight").transpose(1, 2)
        found[f"{prefix}.down_proj_bias"] = every("down_proj.bias")
    return found


class TestGptOss:
    def test_blocks_mean_what_ggufs_reader_says(self) -> None:
        """Every exponent but that of no number."""
        rows = np.random.default_rng(4).integers(0, 256, (255, 2 * 17), dtype=np.uint8)
        rows[:, 0] = rows[:, 17] = np.arange(255)
        weight, expected = weight_of_blocks(rows, Kind.MXFP4), dequantize(rows, Kind.MXFP4)
        assert torch.equal(weight.dequantised(), torch.from_numpy(expected))

    @needs_kernels
    @pytest.mark.parametrize(
        ("kind", "experts"), [(Kind.F16, Kind.MXFP4), (Kind.F16, Kind.F16), (Kind.Q8_0, Kind.MXFP4)]
    )
    def test_logits_of_transformers(
        self, kind: Kind, experts: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Mutants: the halves of a byte by turns, up's biases for gate's, windows in the other layers, no sinks."""
        meant = write_gpt_oss(tmp_path / "tiny.gguf", kind, experts)
        folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
        assert ModelSpec.from_folder(folder).windows == (5, 0)
        assert ModelSpec.from_folder(folder).eos_token_ids == (2, 0)
        found = open_checkpoint(folder, torch.float32)
        assert set(found) == set(meant)
        for name, weight in meant.items():
            mine = found[name]
            in_codes = ".experts." in name and name.endswith("weight") and experts is Kind.MXFP4
            assert not in_codes or (isinstance(mine, QuantizedWeight) and mine.float4)
            mine = mine.dequantised() if isinstance(mine, QuantizedWeight) else mine
            assert torch.allclose(mine, weight, rtol=1e-6, atol=1e-6), name
        check_logits(folder, theirs(tmp_path / "theirs", "GptOss", GPT_OSS, all_in_one(meant)), monkeypatch)

    @needs_kernels
    def test_drafts_batches_and_chunks_change_no_bit(self, tmp_path: Path) -> None:
        write_gpt_oss(tmp_path / "tiny.gguf", Kind.Q8_0)
        check_drafts_batches_and_chunks(tmp_path / "tiny.gguf")

    def test_ranks_have_their_own_experts(self, tmp_path: Path) -> None:
        """Mutant: each rank takes the experts of the first."""
        write_gpt_oss(tmp_path / "tiny.gguf", Kind.Q8_0)
        check_ranks(tmp_path / "tiny.gguf")

    def test_grouped_as_separate(self, tmp_path: Path) -> None:
        """What a GPU runs, in torch."""
        meant = write_gpt_oss(tmp_path / "tiny.gguf", Kind.F16, Kind.F16)
        layer = {name.removeprefix("model.layers.1."): weight for name, weight in meant.items()}
        x, ids = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1)), torch.tensor([[0, 2], [3, 1]] * 3)
        made = [NamedExperts(layer.__getitem__, layer.__getitem__, range(EXPERTS)) for _ in range(2)]
        separate = SeparateClampedExperts(made[0], EXPERTS, (1.7, 0.5))(x[:6], ids)
        torch.testing.assert_close(GroupedClampedExperts(made[1], EXPERTS, (1.7, 0.5))(x[:6], ids), separate)

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"attention.sliding_window": 0}, "sliding_window is 0"),
            ({"attention.sliding_window_pattern": 3}, "sliding_window_pattern 3 is not supported"),
            ({"expert_count": EXPERTS + 1}, "expected 5 experts"),
            ({"expert_gating_func": 2}, "expert_gating_func 2"),
        ],
    )
    def test_refused(self, fields: Fields, named: str, tmp_path: Path) -> None:
        write_gpt_oss(tmp_path / "tiny.gguf", Kind.Q8_0, fields=fields)
        with pytest.raises(ConfigError, match=named):
            open_checkpoint(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.float32)

    def test_what_is_not_written_or_multiplied(self, tmp_path: Path) -> None:
        write_gpt_oss(tmp_path / "tiny.gguf", Kind.Q8_0, up=Kind.Q8_0)
        (tmp_path / "folder").mkdir()
        with pytest.raises(ConfigError, match="not written as a folder"):
            convert(tmp_path / "tiny.gguf", tmp_path / "folder", lambda what, share: None)
        with pytest.raises(ConfigError, match=r"experts.0.gate_proj, experts.0.up_proj are multiplied together"):
            load_target(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.float32, torch.device("cpu"))
