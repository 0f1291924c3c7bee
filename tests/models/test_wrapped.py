"""Language models of checkpoints that read images too, against transformers on tiny random models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.assembly.model_plan import plan_model
from paceline.errors import ConfigError
from paceline.models.announced import read_announced
from paceline.models.config import ModelSpec
from paceline.models.registry import load_target
from paceline.models.wrapped import GEMMA3, MINISTRAL3, MISTRAL, Wrapped, text_name
from paceline.models.write_quantised import write_quantised
from tests.support.needs import needs_kernels
from tests.support.parity import TOKENS, VOCAB, logits_of, worst_difference

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    needs_kernels,
]

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GEMMA_ROPE = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
TEXTS = {
    "Gemma3": SHAPE | GEMMA_ROPE | {"sliding_window": 8, "query_pre_attn_scalar": 24, "pad_token_id": None},
    "Mistral3": SHAPE | {"sliding_window": None, "rope_theta": 1e6, "model_type": "mistral"},
    "Mistral3 of ministral3": SHAPE | {"rope_parameters": MINISTRAL_ROPE, "model_type": "ministral3"},
}
TEXT_CLASSES = (("Gemma3TextConfig", GEMMA3), ("MistralConfig", MISTRAL), ("Ministral3Config", MINISTRAL3))


def write_wrapped(folder: Path, name: str, text: dict[str, Any]) -> torch.Tensor:
    """Save a random model of transformers; its logits of TOKENS. name: its class, and what else tells it apart."""
    import transformers

    name = name.partition(" ")[0]
    torch.manual_seed(5)
    vision = VISION | ({"head_dim": 16} if name == "Mistral3" else {"vision_use_head": False})
    kind = "pixtral" if name == "Mistral3" else "siglip_vision_model"
    outer = {"mm_tokens_per_image": 4} if name == "Gemma3" else {"tie_word_embeddings": False}
    made = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision | {"model_type": kind}, image_token_index=VOCAB - 1, **outer
    )
    made._attn_implementation = "eager"
    reference = getattr(transformers, f"{name}ForConditionalGeneration")(made).eval()
    with torch.no_grad():
        for parameter_name, value in reference.named_parameters():
            if "norm" in parameter_name:
                value.add_(torch.randn_like(value) * 0.3)
    reference.save_pretrained(folder)
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([TOKENS])).logits[0]
    return logits


def rename(folder: Path, released: bool) -> list[str]:
    """Tensors under the names of the released checkpoints, or of those that transformers 5 means; the names."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        part = next((part for part in ("vision_tower.", "multi_modal_projector.") if part in name), None)
        if part is not None:
            own = part + name.partition(part)[2]
            tensors[own if released else f"model.{own}"] = tensor
            continue
        own = text_name(name) or ""
        head = own.startswith("lm_head.")
        inner = own if head else f"model.language_model.{own.removeprefix('model.')}"
        tensors[f"language_model.{own}" if released else inner] = tensor
    save_file(tensors, file)
    return list(tensors)


def change(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))


def text_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    return found


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("name", TEXTS)
def test_tiny_checkpoints(name: str, released: bool, tmp_path: Path) -> None:
    """Mutants: either form of the names is not known; the image's tensors are unknown ones."""
    expected = write_wrapped(tmp_path, name, TEXTS[name])
    names = rename(tmp_path, released)
    prefix = "language_model." if released else "model.language_model."
    assert f"{prefix}{'model.' if released else ''}layers.6.mlp.down_proj.weight" in names
    assert any("vision_tower." in one for one in names)
    assert worst_difference(tmp_path, expected) < 1e-4
    assert expected.std() > 0.3  # the comparison is of something
    plan = plan_model(tmp_path, torch.bfloat16)
    assert (plan.spec, plan.refusals) == (replace(ModelSpec.from_folder(tmp_path), eos_token_ids=()), ())
    assert plan.num_tensors == sum("vision_tower." not in one and "multi_modal" not in one for one in names)


@pytest.mark.parametrize(("name", "record"), TEXT_CLASSES)
def test_defaults_are_those_of_the_class(name: str, record: Wrapped) -> None:
    import transformers

    meant = getattr(transformers, name)()
    for field, value in record.defaults.items():
        assert getattr(meant, field) == value, field


def test_a_context_without_scaled_queries(tmp_path: Path) -> None:
    """Ministral 3 multiplies queries of positions from 32 on. Mutants: its context is what its config says; a
    model without that scaling has the shorter one."""
    text = TEXTS["Mistral3 of ministral3"]
    rope = MINISTRAL_ROPE | {"original_max_position_embeddings": 32}
    expected = write_wrapped(tmp_path, "Mistral3", text | {"rope_parameters": rope})
    assert ModelSpec.from_folder(tmp_path).max_position_embeddings == 32
    model = load_target(tmp_path, torch.float32, torch.device("cpu"))
    differs = (logits_of(model, (32,)) - expected[:32]).abs().max()
    assert differs < 1e-4
    write_wrapped(tmp_path, "Mistral3", text | {"rope_parameters": rope | {"llama_4_scaling_beta": 0.0}})
    assert ModelSpec.from_folder(tmp_path).max_position_embeddings == SHAPE["max_position_embeddings"]
    change(tmp_path, text_config={name: value for name, value in text_of(tmp_path).items() if "rope" not in name})
    with pytest.raises(ConfigError, match="lacks 'rope_parameters'"):
        ModelSpec.from_folder(tmp_path)


def test_a_config_with_what_its_maker_left_in(tmp_path: Path) -> None:
    """The numbers of google/gemma-3-4b-it. Mutant: any default is missing, or another one."""
    from transformers import Gemma3TextConfig

    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    specs = []
    for own in (text, Gemma3TextConfig(**json.loads(json.dumps(text))).to_dict()):
        (tmp_path / "config.json").write_text(json.dumps(outer | {"text_config": own}))
        specs.append(ModelSpec.from_folder(tmp_path))
    assert specs[0] == specs[1]
    spec = specs[0]
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262208, 8, 4, 256)
    assert (spec.rope_theta, spec.local_rope_theta, spec.attention_scale) == (1e6, 1e4, 1 / 16)
    assert (spec.eos_token_ids, spec.tie_word_embeddings, spec.max_model_len) == ((1, 106), True, 131072)
    assert spec.windows == tuple(0 if (i + 1) % 6 == 0 else 1024 for i in range(34))


def test_ids_that_end_an_answer(tmp_path: Path) -> None:
    """Beside text_config, else in it."""
    write_wrapped(tmp_path, "Mistral3", TEXTS["Mistral3"])
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    change(tmp_path, eos_token_id=None, text_config=text_of(tmp_path) | {"eos_token_id": 9})
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == (9,)
    change(tmp_path, eos_token_id=[7, 8])
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == (7, 8)


@pytest.mark.parametrize(("outer", "inner", "tied"), [(True, True, True), (True, False, False), (False, True, False)])
def test_a_head_of_its_own_is_read(outer: bool, inner: bool, tied: bool, tmp_path: Path) -> None:
    """transformers 5 writes its wrapper's default, true, beside a head that the checkpoint has."""
    write_wrapped(tmp_path, "Mistral3", TEXTS["Mistral3"])
    change(tmp_path, tie_word_embeddings=outer, text_config=text_of(tmp_path) | {"tie_word_embeddings": inner})
    assert ModelSpec.from_folder(tmp_path).tie_word_embeddings is tied


def test_a_quantised_copy_is_of_the_language_model(tmp_path: Path) -> None:
    """Mutant: the image's layers are rounded and written too. A config that names wrapped layers to be quantised is
    refused; one that names layers to stay floats is not."""
    source, folder = tmp_path / "source", tmp_path / "written"
    write_wrapped(source, "Mistral3", TEXTS["Mistral3"])
    rename(source, released=True)
    folder.mkdir()
    assert write_quantised(source, folder, "w8a16", lambda what, share: None).layers == 7 * SHAPE["num_hidden_layers"]
    raw = json.loads((folder / "config.json").read_text())
    assert (raw["architectures"], raw["model_type"]) == (["MistralForCausalLM"], "mistral")
    plain, written = (
        logits_of(load_target(each, torch.float32, torch.device("cpu")), (45,)) for each in (source, folder)
    )
    assert (plain - written).abs().mean() < 0.1 * plain.std()
    tensors = {
        f"language_model.{name}": tensor for name, tensor in load_file(next(folder.glob("*.safetensors"))).items()
    }
    for file in (*source.glob("*.safetensors"), *source.glob("*.index.json")):
        file.unlink()
    save_file(tensors | {"vision_tower.norm.weight": torch.ones(4)}, source / "model.safetensors")
    section = raw["quantization_config"] | {"ignore": ["language_model.lm_head", "re:vision_tower.*"]}
    change(source, quantization_config=section)
    again = logits_of(load_target(source, torch.float32, torch.device("cpu")), (45,))
    assert torch.equal(again, written)
    group = section["config_groups"]["group_0"] | {"targets": ["re:.*language_model.*_proj"]}
    change(source, quantization_config=section | {"config_groups": {"group_0": group}})
    with pytest.raises(ConfigError, match="config_groups that name language_model"):
        load_target(source, torch.float32, torch.device("cpu"))


def test_what_is_refused(tmp_path: Path) -> None:
    write_wrapped(tmp_path, "Mistral3", TEXTS["Mistral3"])
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"audio_tower.weight": torch.ones(2)}, file)
    with pytest.raises(ConfigError, match=r"does not know: audio_tower\.weight"):
        load_target(tmp_path, torch.float32, torch.device("cpu"))
    rename(tmp_path, released=True)
    norm = {"model.language_model.norm.weight": torch.ones(SHAPE["hidden_size"])}
    save_file({name: one for name, one in load_file(file).items() if "audio" not in name} | norm, file)
    for read in (lambda: load_target(tmp_path, torch.float32, torch.device("cpu")), lambda: read_announced(tmp_path)):
        with pytest.raises(ConfigError, match=r"tensor model\.norm\.weight is twice"):
            read()
    change(tmp_path, text_config=text_of(tmp_path) | {"model_type": "llama"})
    with pytest.raises(ConfigError, match=r"model_type 'llama', which is not supported \(mistral, ministral3\)"):
        ModelSpec.from_folder(tmp_path)
    change(tmp_path, text_config=None)
    with pytest.raises(ConfigError, match="text_config"):
        ModelSpec.from_folder(tmp_path)
