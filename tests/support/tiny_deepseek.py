"""Tiny random DeepSeek-V3 models: in memory, and as a checkpoint folder with two MTP modules and a tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.assembly.build import assemble
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.models.config import ModelSpec
from paceline.models.deepseek_config import MlaSpec
from paceline.models.deepseek_shapes import layer_shapes, mtp_shapes
from paceline.models.deepseek_v3 import DeepseekV3Model
from paceline.models.llama_shapes import Shapes, model_shapes
from paceline.models.loader import WeightBag
from paceline.models.moe_config import MoeSpec
from tests.support.tiny_model import VOCAB, tiny_config

FOLDER_VOCAB = 320  # the tokenizer's 256 bytes, two special tokens, and ids that no text encodes to
BOS, EOS = 256, 257
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_deepseek_spec(vocab_size: int = VOCAB, num_layers: int = 3) -> ModelSpec:
    """One dense layer, then experts; yarn; widths that fit no block size exactly."""
    return ModelSpec(
        family="deepseek_v3",
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=112,
        num_layers=num_layers,
        num_heads=5,
        num_kv_heads=5,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_ids=(2,),
        bos_token_id=1,
        mla=MlaSpec(q_lora_rank=40, kv_lora_rank=48, nope_dim=24, rope_dim=16, value_dim=20, rope_interleave=True),
        moe=MoeSpec(
            first_layer=1,
            num_experts=8,
            num_shared_experts=1,
            intermediate_size=40,
            top_k=3,
            num_groups=4,
            top_groups=2,
            normalise=True,
            factor=1.5,
        ),
        num_mtp_modules=2,
    )


def module_shapes(spec: ModelSpec, num_modules: int) -> Shapes:
    """Every tensor of the MTP modules but the copies of embedding and head."""
    return {
        f"model.layers.{spec.num_layers + k}.{name}": shape
        for k in range(num_modules)
        for name, shape in mtp_shapes(spec).items()
    }


def random_tensors(shapes: Shapes, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Scaled so that the next-token distribution is neither flat nor a spike, and all experts are chosen at times."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = value * 0.2  # float32 in every checkpoint
        else:
            tensors[name] = (1.0 + 0.1 * value if len(shape) == 1 else value * 0.35).to(dtype)
    return tensors


def target_tensors(spec: ModelSpec, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """A target that repeats itself at times, so that some drafts are accepted: its head leans to the embedding."""
    tensors = random_tensors(model_shapes(spec, lambda i: layer_shapes(spec, i)), dtype, seed)
    head, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = 0.4 * head + 1.2 * embedding
    return tensors


def tiny_deepseek_model(dtype: torch.dtype, seed: int = 0, vocab_size: int = VOCAB) -> DeepseekV3Model:
    """A target in memory."""
    spec = tiny_deepseek_spec(vocab_size)
    bag = WeightBag(target_tensors(spec, dtype, seed))
    model = DeepseekV3Model(spec, bag, dtype, torch.device("cpu"))
    bag.finish()
    return model


def tiny_deepseek_runner(dtype: str = "fp32", seed: int = 0, /, **options: object) -> ModelRunner:
    """A runner over a tiny model; ``options`` are NodeConfig's."""
    config = tiny_config(dtype, options)
    model = tiny_deepseek_model(torch.bfloat16 if config.dtype == "bf16" else torch.float32, seed)
    return assemble(config, model, RunnerIdentity("tiny-deepseek", f"seed-{seed}", "test"))


def config_json(spec: ModelSpec) -> dict[str, object]:
    """``config.json`` as DeepSeek writes it."""
    mla, moe = spec.mla, spec.moe
    assert mla is not None
    assert moe is not None
    scaling = dict(spec.rope_scaling or {})
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "moe_intermediate_size": moe.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_nextn_predict_layers": spec.num_mtp_modules,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "n_shared_experts": moe.num_shared_experts,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.normalise,
        "routed_scaling_factor": moe.factor,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "first_k_dense_replace": moe.first_layer,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": {"type": scaling.pop("rope_type")} | scaling,
        "max_position_embeddings": spec.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": spec.attention_bias,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def ranks_deepseek_spec() -> ModelSpec:
    """A model that 1, 2, 4 or 8 ranks can serve, with the vocabulary of a folder."""
    spec = tiny_deepseek_spec(FOLDER_VOCAB)
    assert spec.mla is not None
    mla = replace(spec.mla, value_dim=32)
    return replace(spec, num_heads=8, num_kv_heads=8, intermediate_size=256, mla=mla)


def write_folder(folder: Path, seed: int = 0, spec: ModelSpec | None = None) -> Path:
    """A bf16 checkpoint as DeepSeek's: target, two MTP modules with their copies, tokenizer. spec: with a vocabulary of
    FOLDER_VOCAB. Returns ``folder``."""
    spec = spec or tiny_deepseek_spec(FOLDER_VOCAB)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = target_tensors(spec, torch.bfloat16, seed)
    tensors |= random_tensors(module_shapes(spec, spec.num_mtp_modules), torch.bfloat16, seed + 1)
    for k in range(spec.num_mtp_modules):
        prefix = f"model.layers.{spec.num_layers + k}"
        tensors[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(spec), indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    _write_tokenizer(folder)
    return folder


def write_mtp_folder(
    folder: Path, num_modules: int, dtype: torch.dtype, seed: int = 7, spec: ModelSpec | None = None
) -> Path:
    """MTP modules alone, for ``--drafter-path``. spec: the target's (tiny_deepseek_spec). Returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = spec or tiny_deepseek_spec()
    tensors = random_tensors(module_shapes(spec, num_modules), dtype, seed)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_nextn_predict_layers": num_modules,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write_tokenizer(folder: Path) -> None:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
