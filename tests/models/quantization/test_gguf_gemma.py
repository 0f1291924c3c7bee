"""GGUF files of Gemma 3: windows, two ropes, four norms a layer whose weights are stored with one added, and a table
that is the LM head, against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from paceline.assembly.model_plan import plan_model
from paceline.errors import ConfigError
from paceline.layers.build import load_kernels
from paceline.layers.quantized import QuantizedWeight
from paceline.models import hub
from paceline.models.config import ModelSpec
from paceline.models.gguf import gemma
from paceline.models.registry import load_target, open_checkpoint
from paceline.text.tokenizer import Tokenizer
from tests.models.quantization.test_checkpoints import TOKENS
from tests.models.quantization.test_gguf_experts import check_drafts_batches_and_chunks, check_logits, check_ranks
from tests.support.gguf_experts import Value
from tests.support.gguf_files import HEADS, HIDDEN, KV_HEADS, VOCAB, WIDE
from tests.support.gguf_gemma import LAYERS, WINDOW, vocabulary, write_gemma3
from tests.support.needs import needs_kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
GLOBAL, LOCAL = {"rope_type": "default", "rope_theta": 100000.0}, {"rope_type": "default", "rope_theta": 10000.0}
GEMMA: dict[str, Any] = {  # what the file is, by hand
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 64, "query_pre_attn_scalar": 64,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"], "pad_token_id": None,
    "rope_parameters": {"full_attention": GLOBAL, "sliding_attention": LOCAL},
}  # fmt: skip
LINEAR: dict[str, Value] = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
YARN = LINEAR | {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 32}
PATTERN = "attention.sliding_window_pattern"
STRETCHED = {"full_attention": GLOBAL | {"rope_type": "linear", "factor": 8.0}, "sliding_attention": LOCAL}
OTHER_LOCAL = {"full_attention": GLOBAL, "sliding_attention": LOCAL | {"rope_theta": 50.0}}
BY_TURNS = ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]
Case = tuple[Kind, dict[str, Any], Mapping[str, Value], dict[str, Any]]  # kind, of write_gemma3, fields, changes
CASES: dict[str, Case] = {
    "floats": (Kind.F16, {}, {}, {}),
    "as Google's files for Q4_0": (Kind.Q4_0, {"table": Kind.F16}, LINEAR | {"rope.scaling.factor": 1.0}, {}),
    "the table in codes": (Kind.Q4_0, {"table": Kind.Q6_K}, {}, {}),
    "stretched": (Kind.F16, {}, LINEAR, {"rope_parameters": STRETCHED}),
    "another local rope": (Kind.F16, {}, {"rope.freq_base_swa": 50.0}, {"rope_parameters": OTHER_LOCAL}),
    "windows in every second layer": (Kind.F16, {}, {PATTERN: 2}, {"layer_types": BY_TURNS}),
    "windows of a list": (Kind.F16, {}, {PATTERN: [name[0] == "s" for name in BY_TURNS]}, {"layer_types": BY_TURNS}),
    "wide heads": (Kind.F16, {"head_dim": 128}, {}, {"head_dim": 128, "query_pre_attn_scalar": 128}),
    "images": (Kind.F16, {"images": True}, {}, {}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own; the kernels stay where they are compiled."""
    load_kernels()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def theirs(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of TOKENS by transformers' class with ``weights``, float32."""
    import transformers

    transformers.Gemma3TextConfig(**config).save_pretrained(folder)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    reference = transformers.Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        found: torch.Tensor = reference.eval()(torch.tensor([TOKENS])).logits[0]
    return found


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_logits_of_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: norms as they lie in the file; the norms around the MLP changed over; the global rope not stretched, or
    its base in layers with a window; windows in every layer; scores scaled by the hidden size over the heads."""
    kind, how, fields, changes = CASES[case]
    meant = write_gemma3(tmp_path / "tiny.gguf", kind, fields, **how)
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    check_logits(folder, theirs(tmp_path / "theirs", GEMMA | changes, meant), monkeypatch)


@needs_kernels
def test_scores_of_the_27b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told by its layers. Mutant: scaled by the width of a head, as in the others."""
    monkeypatch.setattr(gemma, "SQUARE_LAYERS", LAYERS)
    meant = write_gemma3(tmp_path / "tiny.gguf", Kind.F16, head_dim=128)
    config = GEMMA | {"head_dim": 128, "query_pre_attn_scalar": HIDDEN // HEADS}
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    check_logits(folder, theirs(tmp_path / "theirs", config, meant), monkeypatch)


def test_norms_are_the_checkpoints(tmp_path: Path) -> None:
    """To the last bit in bf16, which each of them was in before one was added to it. Mutant: one is taken off in
    bf16."""
    meant = write_gemma3(tmp_path / "tiny.gguf", Kind.Q4_0, table=Kind.F16)
    found = open_checkpoint(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.bfloat16)
    assert set(found) == set(meant)
    norms = [name for name in meant if name.endswith("norm.weight")]
    assert len(norms) == 6 * LAYERS + 1
    for name, weight in meant.items():
        mine = found[name]
        if isinstance(mine, QuantizedWeight):
            assert torch.allclose(mine.dequantised(), weight, rtol=1e-6, atol=1e-6), name
        else:
            assert torch.equal(mine, weight.bfloat16()), name


@pytest.mark.parametrize("turns", [3, 1])
def test_its_tokenizer(turns: int, tmp_path: Path) -> None:
    """As Gemma's: no space comes first though the file does not say it, and a turn ends a text. Mutants: a space comes
    first; the marks of a turn are text where the file takes them for text."""
    write_gemma3(tmp_path / "tiny.gguf", Kind.F16, turns=turns)
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    assert ModelSpec.from_folder(folder).eos_token_ids == (1, 5)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("<start_of_turn>a\nab ab  a<end_of_turn>")
    expected = ["<bos>", "<start_of_turn>", "a", "\n", "ab", "▁ab", "▁", "▁a", "<end_of_turn>"]
    assert [vocabulary().tokens[i] for i in ids] == expected
    assert tokenizer.decode(ids) == "a\nab ab  a"


def test_it_is_planned(tmp_path: Path) -> None:
    """With the windows and the table that a node has, and no tensors of images."""
    meant = write_gemma3(tmp_path / "tiny.gguf", Kind.Q4_0, table=Kind.Q6_K, images=True)
    plan = plan_model(tmp_path / "tiny.gguf", torch.bfloat16)
    assert (plan.num_tensors, plan.spec.tie_word_embeddings, plan.refusals) == (len(meant), True, ())
    assert plan.spec.windows == (WINDOW,) * 5 + (0, WINDOW)


@needs_kernels
def test_drafts_batches_and_chunks_change_no_bit(tmp_path: Path) -> None:
    write_gemma3(tmp_path / "tiny.gguf", Kind.Q4_0, table=Kind.Q6_K)
    check_drafts_batches_and_chunks(tmp_path / "tiny.gguf")


def test_ranks(tmp_path: Path) -> None:
    write_gemma3(tmp_path / "tiny.gguf", Kind.Q8_0)
    check_ranks(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"final_logit_softcapping": 30.0}, r"gemma3\.final_logit_softcapping 30\.0 is not supported"),
        ({"attn_logit_softcapping": 50.0}, r"gemma3\.attn_logit_softcapping 50\.0 is not supported"),
        ({"attention.sliding_window": 0}, "sliding_window is 0"),
        ({PATTERN: 0}, "sliding_window_pattern is 0"),
        ({PATTERN: [True]}, "not a list of true and false for each of 7 layers"),
        ({"rope.freq_base_swa": 1.0}, "freq_base_swa is 1.0, expected more than 1"),
        (LINEAR | {"rope.scaling.factor": 0.0}, "factor is 0.0, expected more than 0"),
        (YARN, "'yarn'"),
        ({"rope.dimension_count": 32}, "heads of which rope turns a part"),
        ({"expert_count": 4}, "experts are not supported in GGUF files of gemma3"),
        ({"block_count": LAYERS + 1}, r"model\.layers\.7\..* is missing"),
    ],
)  # fmt: skip
def test_refused(fields: Mapping[str, Value], named: str, tmp_path: Path) -> None:
    write_gemma3(tmp_path / "tiny.gguf", Kind.F16, fields)
    with pytest.raises(ConfigError, match=named):
        load_target(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.bfloat16, torch.device("cpu"))
