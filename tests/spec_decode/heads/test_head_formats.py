"""Every public format of draft heads (algorithms.md F): told apart, read whole, and refused when anything is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.select import attention_for
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.base import ForwardContext
from paceline.models.llama import LlamaModel
from paceline.spec_decode.drafters.medusa import MedusaHeads
from paceline.spec_decode.heads.detect import HeadFormat, check_copies, detect, load_head, read_head
from paceline.spec_decode.heads.formats.config import HeadKind, MedusaConfig, MtpConfig
from paceline.spec_decode.heads.formats.eagle import vocabulary_map, vocabulary_tensors
from paceline.spec_decode.heads.formats.write import write_medusa, write_mtp
from paceline.spec_decode.heads.mtp import MtpHead, MtpModule, mtp_kv_layers
from tests.support import head_files
from tests.support.head_files import (
    COPIES,
    DRAFT_IDS,
    HIDDEN,
    MOE,
    TARGET,
    at_layer,
    mimo,
    mtp_config,
    mtp_module,
    put,
    qwen,
    vllm_medusa,
)
from tests.support.plain_heads import PlainTarget, read_and_run
from tests.support.tiny_model import VOCAB, tiny_spec, tiny_weights

LAYERS = 2
Files = tuple[dict[str, Tensor], dict[str, Any], str]
SAFE, BIN, PT = "model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"
MEDUSA_CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "tiny"}  # there are 3
GLM = {"model_type": "glm4_moe", "partial_rotary_factor": 0.5}
VLLM_CONFIG = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "truncated_vocab_size": len(DRAFT_IDS)}
VLLM_CONFIG["vocab_size"] = VOCAB
FORMATS: dict[str, tuple[HeadFormat, HeadKind, Files]] = {
    "eagle1": (HeadFormat.EAGLE1, HeadKind.EAGLE1, (*head_files.eagle1(), BIN)),
    "eagle1 safetensors": (HeadFormat.EAGLE1, HeadKind.EAGLE1, (*head_files.eagle1(bias=True), SAFE)),
    "eagle3": (HeadFormat.EAGLE3, HeadKind.EAGLE3, (*head_files.eagle3(), SAFE)),
    "eagle3 bin": (HeadFormat.EAGLE3, HeadKind.EAGLE3, (*head_files.eagle3(), BIN)),
    "speculators": (
        *(HeadFormat.EAGLE3_SPECULATORS, HeadKind.EAGLE3),
        (*head_files.speculators(*head_files.eagle3(norm_before_fc=True)), SAFE),
    ),
    "medusa": (HeadFormat.MEDUSA, HeadKind.MEDUSA, (head_files.medusa(), MEDUSA_CONFIG, PT)),
    "medusa v2": (HeadFormat.MEDUSA, HeadKind.MEDUSA, (head_files.medusa(vocabulary_rows=0), MEDUSA_CONFIG, SAFE)),
    "medusa vllm": (HeadFormat.MEDUSA_VLLM, HeadKind.MEDUSA, (vllm_medusa(), VLLM_CONFIG, SAFE)),
    "deepseek": (
        *(HeadFormat.MTP_DEEPSEEK, HeadKind.MTP),
        (at_layer(LAYERS, mtp_module()), mtp_config(LAYERS), SAFE),
    ),
    "deepseek in the target": (
        *(HeadFormat.MTP_DEEPSEEK, HeadKind.MTP),
        (TARGET | at_layer(LAYERS, mtp_module() | COPIES), mtp_config(LAYERS), SAFE),
    ),
    "glm": (
        *(HeadFormat.MTP_DEEPSEEK, HeadKind.MTP),
        (TARGET | at_layer(46, MOE), mtp_config(46, **GLM), SAFE),
    ),
    "nextn": (HeadFormat.MTP_NEXTN, HeadKind.MTP, (at_layer(0, mtp_module() | COPIES), mtp_config(1), SAFE)),
    "mimo": (HeadFormat.MTP_MIMO, HeadKind.MTP, (TARGET | mimo(), mtp_config(LAYERS), SAFE)),
    "qwen": (
        *(HeadFormat.MTP_QWEN, HeadKind.MTP),
        (TARGET | qwen(), {"text_config": mtp_config(LAYERS, mtp_num_hidden_layers=1)}, SAFE),
    ),
}


def target() -> LlamaModel:
    """The tiny Llama with an MLP as wide as the modules here."""
    spec = tiny_spec(num_layers=LAYERS)
    spec = type(spec)(**{**vars(spec), "intermediate_size": head_files.WIDE})
    return LlamaModel(spec, tiny_weights(spec, torch.float32), torch.float32, torch.device("cpu"))


def plain_target(model: LlamaModel) -> PlainTarget:
    return PlainTarget(model.embedding, model.embedding, LAYERS, 1e-5, mtp_config(LAYERS))


@pytest.mark.parametrize("case", FORMATS)
def test_detected_and_read_whole(case: str, tmp_path: Path) -> None:
    expected, kind, files = FORMATS[case]
    folder = put(tmp_path, *files)
    assert detect(folder) is expected
    head = read_head(folder, torch.bfloat16)
    assert (head.format, head.kind) == (expected, kind)
    assert len(head.digest) == 32
    bag = head.bag()
    for name, tensor in head.tensors.items():
        floating = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
        assert not tensor.is_floating_point() or tensor.dtype is floating
        bag.take(name, tuple(tensor.shape))
    bag.finish()


def test_detection_looks_in_order(tmp_path: Path) -> None:
    """What a later rule would also match belongs to the earlier one."""
    tensors, config = head_files.eagle3()
    both = (tensors, config | {"medusa_num_heads": 1, "num_nextn_predict_layers": 1})
    renamed, spec_config = head_files.speculators(*both)
    assert detect(put(tmp_path, renamed, spec_config)) is HeadFormat.EAGLE3_SPECULATORS
    assert detect(put(tmp_path, *both)) is HeadFormat.MEDUSA
    assert detect(put(tmp_path, tensors, config | {"num_nextn_predict_layers": 1})) is HeadFormat.EAGLE3
    del config["draft_vocab_size"]
    assert detect(put(tmp_path, tensors, config)) is HeadFormat.EAGLE3  # by midlayer.*
    tensors, config = head_files.eagle1()
    assert detect(put(tmp_path, tensors, config | {"eagle_config": {}})) is HeadFormat.EAGLE3
    assert detect(put(tmp_path, tensors, config | {"num_nextn_predict_layers": 1})) is HeadFormat.EAGLE1


# ---- anything off is refused, in every format


@pytest.mark.parametrize("case", FORMATS)
def test_unknown_missing_and_misshapen_tensors_are_refused(case: str, tmp_path: Path) -> None:
    _, kind, (tensors, config, file) = FORMATS[case]
    folder = tmp_path / "head"
    own = [name for name in tensors if name not in TARGET and "t2d" not in name and "embed_tokens" not in name]
    own = [name for name in own if "shared_head.head" not in name]
    prefix = ""
    if kind is HeadKind.MTP:
        prefix = next(name for name in own if "input_layernorm" in name).removesuffix("input_layernorm.weight")
    stranger = f"{prefix}stranger.weight"
    with pytest.raises(ConfigError, match=r"unknown tensors?:.*stranger"):
        read_head(put(folder, tensors | {stranger: torch.ones(3)}, config, file), torch.float32)
    for name in own:
        if "shared_experts" in name or "correction_bias" in name or name == "fc.bias":
            continue  # not every module has them
        less = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(ConfigError) as refused:
            read_head(put(folder, less, config, file), torch.float32)
        assert refused.value.key == "drafter_path", name
    # Shapes inside a block of experts are the target model's to check.
    checked = [name for name in own if case != "glm" or name.startswith(("model.layers.46.e", "model.layers.46.h"))]
    for name in checked:
        wrong = tensors | {name: torch.cat((tensors[name], tensors[name]))}
        with pytest.raises(ConfigError):
            read_head(put(folder, wrong, config, file), torch.float32)


def test_what_config_and_files_say_must_agree(tmp_path: Path) -> None:
    def refusal(tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as refused:
            read_head(put(tmp_path, tensors, config), torch.float32)
        assert refused.value.key == "drafter_path"
        return refused.value.message

    tensors, config = head_files.eagle1()
    assert "fc.bias is not there" in refusal(tensors, config | {"bias": True})
    assert "heads of 2 layers" in refusal(tensors, config | {"num_hidden_layers": 2})
    assert "hidden_act 'gelu'" in refusal(tensors, config | {"hidden_act": "gelu"})
    assert "hidden_size as a positive integer" in refusal(tensors, config | {"hidden_size": None})
    assert "rope scaling 'dynamic'" in refusal(tensors, config | {"rope_scaling": {"type": "dynamic", "factor": 2}})
    assert "lacks factor" in refusal(tensors, config | {"rope_scaling": {"type": "linear"}})
    assert "quant_method 'hqq'" in refusal(tensors, config | {"quantization_config": {"quant_method": "hqq"}})
    assert "quantised" in refusal(tensors | {"fc.weight_scale_inv": torch.ones(1)}, config)
    tensors, config = head_files.eagle3()
    assert "needs d2t" in refusal({n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}, config)
    assert "use_aux_hidden_state" in refusal(tensors, config | {"eagle_config": {"use_aux_hidden_state": False}})
    assert "speculators_model_type 'eagle'" in refusal(tensors, config | {"speculators_model_type": "eagle"})
    twice = tensors | {"layers.0.hidden_norm.weight": tensors["midlayer.hidden_norm.weight"]}
    assert "are the same tensor" in refusal(twice, config)
    modules = at_layer(LAYERS, mtp_module())
    assert "hold 1 modules" in refusal(modules, mtp_config(LAYERS, num_nextn_predict_layers=2))
    assert "one after another" in refusal(modules | at_layer(LAYERS + 2, mtp_module()), mtp_config(LAYERS))
    assert "unknown tensors: extra.weight" in refusal(modules | {"extra.weight": torch.ones(3)}, mtp_config(LAYERS))
    assert "no draft head" in refusal(TARGET, mtp_config(LAYERS))


def test_folders_and_files_that_are_no_head(tmp_path: Path) -> None:
    tensors, config = head_files.eagle1()
    with pytest.raises(ConfigError, match="is not a folder"):
        read_head(tmp_path / "none", torch.float32)
    put(tmp_path, tensors, config, BIN)
    for content in (b"", b"not a file of weights"):
        (tmp_path / BIN).write_bytes(content)
        with pytest.raises(ConfigError, match="not a readable file of weights"):
            read_head(tmp_path, torch.float32)
    torch.save([1, 2], tmp_path / BIN)
    with pytest.raises(ConfigError, match="does not hold tensors"):
        read_head(tmp_path, torch.float32)
    torch.save({"fc.weight": slice(1)}, tmp_path / BIN)  # not on torch's list of what weights may hold
    with pytest.raises(ConfigError, match="not a readable file of weights"):
        read_head(tmp_path, torch.float32)
    (tmp_path / BIN).unlink()
    with pytest.raises(ConfigError, match="lacks safetensors"):
        read_head(tmp_path, torch.float32)


def test_the_digest_follows_the_weights(tmp_path: Path) -> None:
    tensors, config = head_files.eagle1()
    for file in (BIN, SAFE):
        first = read_head(put(tmp_path / f"a{file}", tensors, config, file), torch.float32).digest
        same = read_head(put(tmp_path / f"b{file}", tensors, config, file), torch.float32).digest
        other = dict(tensors, **{"fc.weight": tensors["fc.weight"] + 1})
        assert first == same
        assert first != read_head(put(tmp_path / f"c{file}", other, config, file), torch.float32).digest


# ---- Medusa


@pytest.mark.parametrize("case", ["medusa", "medusa v2", "medusa vllm"])
def test_medusa_heads_run_as_plain_ones(case: str, tmp_path: Path) -> None:
    model = target()
    tensors, config, file = FORMATS[case][2]
    head = read_head(put(tmp_path / "public", tensors, config, file), torch.float32)
    assert isinstance(head.config, MedusaConfig)
    assert (head.config.num_heads, head.config.num_blocks) == (3, 2)
    write_medusa(tmp_path / "written", head.tensors, head.config)
    again = read_head(tmp_path / "written", torch.float32)
    assert again.config == head.config
    hidden = torch.randn(4, HIDDEN)
    heads = MedusaHeads(model, dict(again.tensors))
    plain = read_and_run("medusa", tmp_path / "written", torch.tensor([]), hidden, plain_target(model))
    if heads.token_map is not None:
        plain = plain[..., heads.token_map]
    assert (heads.logits(hidden) - plain).abs().max() < 1e-5 * plain.abs().max()
    for name, tensor in head.tensors.items():
        bfloat = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(again.tensors[name], bfloat)


def test_medusa_names_with_a_module_before_them_and_one_shared_matrix(tmp_path: Path) -> None:
    tensors = head_files.medusa()
    before = {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}
    head = read_head(put(tmp_path / "prefix", before, MEDUSA_CONFIG), torch.float32)
    assert all(torch.equal(head.tensors[name], tensor) for name, tensor in tensors.items())
    shared = {name: tensor for name, tensor in vllm_medusa().items() if not name.startswith("lm_heads")}
    shared["lm_head.weight"] = TARGET["lm_head.weight"]
    config = VLLM_CONFIG | {"original_lm_head": True}
    head = read_head(put(tmp_path / "shared", shared, config), torch.float32)
    for k in range(3):
        assert torch.equal(head.tensors[f"{k}.2.weight"], TARGET["lm_head.weight"][DRAFT_IDS])


# ---- MTP


@pytest.mark.parametrize("case", ["deepseek", "deepseek in the target", "nextn", "mimo", "qwen"])
def test_mtp_layouts_are_one_canonical_module(case: str, tmp_path: Path) -> None:
    """Bit for bit where nothing but names differ; then the module against plain torch."""
    model = target()
    tensors, config, file = FORMATS[case][2]
    head = read_head(put(tmp_path / "public", tensors, config, file), torch.float32, first_layer=LAYERS)
    assert isinstance(head.config, MtpConfig)
    assert (head.config.first_layer, head.config.num_modules) == (LAYERS, 1)
    wanted = at_layer(LAYERS, mtp_module())
    assert set(head.tensors) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.allclose(head.tensors[name], tensor, atol=1e-6, rtol=0)  # (w - 1) + 1 rounds
    assert set(head.copies) == ({f"0.{n}" for n in COPIES} if case in ("deepseek in the target", "nextn") else set())
    folder = put(tmp_path / "canonical", dict(head.tensors), mtp_config(LAYERS))
    bag = head.bag()
    module = MtpModule(model, bag, f"model.layers.{LAYERS}", LAYERS, model.rope_table())
    bag.finish()
    runs(model, MtpHead(model, module), folder)


def runs(model: LlamaModel, head: MtpHead, folder: Path) -> None:
    """A chain of rows equals plain torch."""
    kv = KvPool(KvLayout((*model.kv_layers, *mtp_kv_layers(model.kv_layers, 1)), model.dtype), 4, 4)
    batch = ForwardBatch.build([Segment.linear([5, 9, 3, 44, 17], 0, torch.arange(16, dtype=torch.int32))])
    attention = attention_for(model.device, 4, 2, 16)
    rows = torch.randn(5, HIDDEN)
    logits = head.logits(head.forward(batch.token_ids, rows, ForwardContext.build(batch, kv, attention)))
    plain = read_and_run("mtp", folder, batch.token_ids, rows, plain_target(model))
    assert (logits - plain).abs().max() < 1e-5 * plain.abs().max()


def test_written_modules_read_back(tmp_path: Path) -> None:
    tensors = at_layer(LAYERS, mtp_module()) | at_layer(LAYERS + 1, mtp_module(seed=9))
    config = mtp_config(LAYERS, num_nextn_predict_layers=2, mtp_chained=False)
    first = read_head(put(tmp_path / "public", tensors, config), torch.bfloat16)
    assert isinstance(first.config, MtpConfig)
    assert not first.config.chained
    write_mtp(tmp_path / "written", first.tensors, first.config)
    second = read_head(tmp_path / "written", torch.bfloat16)
    assert second.config == first.config
    assert set(second.tensors) == set(tensors)
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in tensors)
    with pytest.raises(ConfigError, match="missing"):
        write_mtp(tmp_path / "less", at_layer(LAYERS, mtp_module()), first.config)


def test_norms_gain_their_one_before_they_are_rounded(tmp_path: Path) -> None:
    """Stored in bf16, w near 0 is finer than 1 + w: adding in bf16 would round twice."""
    stored = {name: tensor.bfloat16() for name, tensor in qwen().items()}
    head = read_head(put(tmp_path, TARGET | stored, mtp_config(LAYERS)), torch.float32)
    exact = stored["mtp.norm.weight"].float() + 1.0
    assert torch.equal(head.tensors[f"model.layers.{LAYERS}.shared_head.norm.weight"], exact)


def test_copies_must_be_the_targets(tmp_path: Path) -> None:
    model = target()
    true = {"embed_tokens.weight": model.embedding, "shared_head.head.weight": model.embedding.clone()}
    for name in (None, *true):
        copies = {n: t + 0.01 if n == name else t for n, t in true.items()}
        folder = put(tmp_path / str(name), at_layer(LAYERS, mtp_module() | copies), mtp_config(LAYERS))
        head = read_head(folder, torch.float32)
        if name is None:
            check_copies(head, model)
            continue
        with pytest.raises(ConfigError, match=f"0.{name} is not a copy"):
            check_copies(head, model)


def test_heads_of_other_drafters_are_refused_by_load_head(tmp_path: Path) -> None:
    for case in ("medusa", "deepseek"):
        with pytest.raises(ConfigError, match=r"choose the (medusa|mtp) drafter"):
            load_head(put(tmp_path / case, *FORMATS[case][2]), target(), LAYERS)


# ---- the vocabulary map


def test_vocabulary_tensors() -> None:
    tensors = vocabulary_tensors(DRAFT_IDS, VOCAB)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in head_files.vocabulary().items())
    assert vocabulary_map(tensors["d2t"], tensors["t2d"]).tolist() == DRAFT_IDS
    for wrong in ([5, 3], [3, 3], [3, VOCAB], [-1, 3]):
        with pytest.raises(ConfigError, match="d2t"):
            vocabulary_tensors(wrong, VOCAB)
    with pytest.raises(ConfigError, match="integers"):
        vocabulary_map(tensors["d2t"].float(), tensors["t2d"])
