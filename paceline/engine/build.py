"""From options to a ready ModelRunner."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from paceline.attention.cpu import attention_for
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner, RunnerIdentity, RunnerLimits
from paceline.engine.selfcheck import is_bit_exact
from paceline.errors import ConfigError
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import KvLayer, KvLayout
from paceline.kvcache.pool import KvPool
from paceline.kvcache.prefix import PrefixCache
from paceline.layers.build import kernel_set, set_threads
from paceline.models.base import TargetModel
from paceline.models.config import ModelSpec
from paceline.models.hub import resolve_model
from paceline.models.llama import LlamaModel
from paceline.models.loader import WeightBag, load_weights, weights_digest
from paceline.spec_decode.base import Drafter
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.drafters.mtp import MtpDrafter
from paceline.spec_decode.drafters.ngram import NgramDrafter
from paceline.spec_decode.drafters.none import NoDrafter
from paceline.spec_decode.heads.mtp import MtpHead, MtpModule, load_mtp, mtp_kv_layers

log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NCCL_NOTE = "device cuda needs a CUDA build of torch and a GPU; use --device cpu"


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> TargetModel:
    """The target model of a Hugging Face folder."""
    bag = WeightBag(load_weights(folder, dtype))
    model = LlamaModel(ModelSpec.from_folder(folder), bag, dtype, device)
    bag.finish()
    return model


def build_runner(config: NodeConfig) -> ModelRunner:
    """Load target and drafter, make the pool, run the self-check. Raises ConfigError naming the option."""
    torch.set_num_threads(config.threads)
    set_threads(config.threads)
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", NCCL_NOTE)
    folder = resolve_model(config.model)
    model = load_model(folder, DTYPES[config.dtype], device)
    return assemble(config, model, RunnerIdentity(Path(config.model).name, weights_digest(folder), kernel_set()))


def assemble(config: NodeConfig, model: TargetModel, identity: RunnerIdentity) -> ModelRunner:
    """A runner around a loaded model."""
    spec = model.spec
    modules: list[MtpModule] = []
    drafter_digest = ""
    if config.drafter == "mtp":
        if not config.drafter_path:
            log.warning(
                "no --drafter-path: MTP heads are untrained; the text is right, but almost no draft is accepted"
            )
        table = model.rope_table()
        modules, drafter_digest = load_mtp(config.drafter_path, model, config.mtp_modules, table)
    draft_layers: tuple[KvLayer, ...] = mtp_kv_layers(model.kv_layers, len(modules))
    layout = KvLayout((*model.kv_layers, *draft_layers), model.dtype)
    num_pages = -(-config.kv_cache_tokens // config.page_size)
    kv = KvPool(layout, num_pages, config.page_size, model.device)
    allocator = PageAllocator(num_pages)
    attention = attention_for(model.device, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    drafter: Drafter = NoDrafter()
    if config.drafter == "ngram":
        drafter = NgramDrafter(spec.vocab_size)
    elif len(modules) == 1:
        drafter = FeatureDrafter("mtp", model, MtpHead(model, modules[0]), kv, attention, config.tree_width)
    elif modules:
        drafter = MtpDrafter(model, modules, kv, attention, config.tree_width)
    prefix = None
    if config.prefix_cache:
        prefix = PrefixCache(allocator, config.page_size, drafter.lookahead, identity.namespace(drafter_digest))
    limits = RunnerLimits(_max_model_len(config, spec), config.num_draft_tokens, config.tree_width)
    exact = is_bit_exact(model, kv, allocator, attention)
    log.info("kernels %s: this host is %s", identity.kernels, "bit-exact" if exact else "NOT bit-exact")
    return ModelRunner(model, drafter, kv, allocator, prefix, attention, limits, identity, drafter_digest, exact)


def _max_model_len(config: NodeConfig, spec: ModelSpec) -> int:
    own = spec.max_model_len
    if config.max_model_len > own:
        raise ConfigError("max_model_len", f"{config.max_model_len} is more than the model's own {own}")
    longest = config.max_model_len or own
    spec_slots = 1 + config.num_draft_tokens * config.tree_width
    fits = config.kv_cache_tokens - spec_slots
    if config.max_model_len > fits:
        raise ConfigError("kv_cache_tokens", f"must hold max_model_len and {spec_slots} draft slots")
    return min(longest, fits)
