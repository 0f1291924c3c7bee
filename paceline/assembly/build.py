"""Builds a ready ModelRunner from options."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from paceline.assembly.drafting import plan_drafter, plan_export
from paceline.assembly.graph_build import SCRATCH_PAGES, capture_graphs, wants_graphs
from paceline.assembly.head_check import check_heads, judge
from paceline.assembly.kept_figures import Figures, figures_key, keep_figures, read_figures
from paceline.assembly.measure import measure_costs
from paceline.assembly.selfcheck import probe_bits
from paceline.assembly.shipped import with_real_drafter
from paceline.assembly.warm import warm_kernels
from paceline.attention.base import AttentionBackend
from paceline.attention.select import attention_for, tell_what_serves
from paceline.config import NodeConfig
from paceline.engine.handoff_contents import HandoffContents
from paceline.engine.model_runner import ModelRunner, RunnerIdentity, RunnerLimits
from paceline.errors import ConfigError
from paceline.grammar.compile import GrammarCompiler
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import KvLayout, latents_refused
from paceline.kvcache.memory import KvMemory
from paceline.kvcache.prefix import PrefixCache
from paceline.layers.bits import layer_bits, products_name
from paceline.layers.build import kernel_set, set_threads
from paceline.layers.shared_weights import shared_weights
from paceline.models.base import TargetModel
from paceline.models.config import ModelSpec
from paceline.models.digest import weights_digest
from paceline.models.hub import resolve_model
from paceline.models.registry import DTYPES, load_target
from paceline.phases import phase
from paceline.ranks.load import load_parallel
from paceline.ranks.options import threads_per_rank
from paceline.spec_decode.drafters.plan import budget_of
from paceline.spec_decode.length.adaptive import make_policy
from paceline.spec_decode.length.cost import CostTable
from paceline.speculation import AUTO

log = logging.getLogger(__name__)

CUDA_CONNECTIONS = "32"  # queues of a GPU: of the engine, and of the links beside it
ASSUMED_STEP_S = 0.02  # of the cost table until rounds were measured
NO_CUDA = "device cuda needs a CUDA build of torch and a GPU; use --device cpu"


def build_runner(config: NodeConfig, *, decodes: bool = True) -> ModelRunner:
    """Load target and drafter, make the pool, run the self-checks. Raises ConfigError naming the option.

    decodes: also measure what only rounds need: their costs where they are weighed, the acceptance of heads.
    """
    config = with_real_drafter(config)
    threads = threads_per_rank(config)
    torch.set_num_threads(threads)
    set_threads(threads)
    device = torch.device(config.device)
    set_queues(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", NO_CUDA)
    folder = resolve_model(config.model)
    with ExitStack() as on_failure:
        with shared_weights(config.weight_file):
            with phase("loading the model"):
                model = _load(config, folder, device)
            on_failure.callback(model.close)
            runner = _assembled(config, folder, model, decodes=decodes)
        _warm(runner, config, folder, decodes=decodes)  # rounds are measured with the weights as they stay
        on_failure.pop_all()
        return runner


def set_queues(device: torch.device) -> None:
    """Give a GPU enough queues that a kernel which waits, of a link's say, holds up no other. The device reads it when
    this process first uses it."""
    if device.type == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", CUDA_CONNECTIONS)


def _assembled(config: NodeConfig, folder: Path, model: TargetModel, *, decodes: bool) -> ModelRunner:
    identity = RunnerIdentity(Path(config.model).name, weights_digest(folder), kernel_set(), config.quantize)
    return assemble(config, model, identity, GrammarCompiler(folder, model.spec.vocab_size), decodes=decodes)


def _warm(runner: ModelRunner, config: NodeConfig, folder: Path, *, decodes: bool) -> None:
    with phase("compiling kernels"):
        warm_kernels(runner, config.chunk_tokens, config.max_running, decodes=decodes)
    if decodes:
        _measure(runner, config, folder)


def _load(config: NodeConfig, folder: Path, device: torch.device) -> TargetModel:
    if config.kv_dtype != "auto" and ModelSpec.from_folder(folder).mla is not None:
        raise latents_refused()  # before hundreds of gigabytes are read
    with layer_bits(config.bits, device):
        if config.tp > 1:
            return load_parallel(config, folder, num_pages_of(config))
        return load_target(folder, DTYPES[config.dtype], device, config.quantize)


def num_pages_of(config: NodeConfig) -> int:
    """Pages of a node's KV cache, or of each rank's where each has sequences of its own."""
    return -(-config.kv_cache_tokens // config.page_size)


def _measure(runner: ModelRunner, config: NodeConfig, folder: Path) -> None:
    """Check the heads and measure what rounds cost, or take from an earlier start what it found (kept_figures)."""
    weighed = config.adaptive == "goodput" or config.drafter == AUTO
    if not weighed and not config.head_check:
        return
    key = figures_key(runner, config)
    costs, kept = runner.policy.costs, read_figures(key)
    if kept is not None:
        log.info("costs of rounds and the check of heads are those of an earlier start")
        judge(runner.drafter.name, kept.heads, weighed=weighed)
        if costs is not None and kept.target is not None:
            costs.take(kept.target, kept.drafts)
        return
    heads = None
    if config.head_check:
        with phase("checking the draft heads"):
            heads = check_heads(runner, folder, weighed=weighed)
    if weighed:
        with phase("measuring what rounds cost"):
            measure_costs(runner, config.max_running)
    if weighed and costs is not None:
        keep_figures(key, Figures(costs.target, costs.timed_drafts(), heads))
    else:
        keep_figures(key, Figures(None, {}, heads))


def assemble(
    config: NodeConfig,
    model: TargetModel,
    identity: RunnerIdentity,
    grammars: GrammarCompiler | None = None,
    *,
    decodes: bool = True,
) -> ModelRunner:
    """A runner around a loaded model. grammars: as ModelRunner has them. decodes: False on a prefill node, which drafts
    nothing and has the drafter only where draft KV is to cross."""
    costs = CostTable.assumed(ASSUMED_STEP_S)
    drafts = decodes or config.handoff == "draft_kv"
    with phase("loading the drafter"), layer_bits(config.bits, model.device):
        plan = plan_drafter(config, model, costs) if drafts else plan_export(config, model)
    layout = KvLayout.of((*model.kv_layers, *plan.kv_layers), model.dtype, config.kv_dtype)
    num_pages = num_pages_of(config) * config.attention_dp
    graphs = decodes and wants_graphs(config)
    kv = model.make_pool(layout, num_pages + (SCRATCH_PAGES if graphs else 0), config.page_size)
    allocator = PageAllocator(num_pages, config.attention_dp)
    spec, attention = model.spec, _attention(config, model)
    if model.device.type == "cuda":
        tell_what_serves(attention, layout, spec.num_heads)
    drafter = plan.make(kv, attention)
    budget = budget_of(config)
    spec_slots = max(budget.max_nodes, drafter.draft_slots(budget))
    max_model_len = _max_model_len(config, spec, spec_slots)
    contents = HandoffContents.of(config, drafter, spec.hidden_size)
    kernels = identity.kernels if model.device.type == "cpu" else device_kernels(model.device, attention, config.bits)
    with phase("checking bits"):
        probed = probe_bits(model, kv, allocator, attention)
    _tell_exactness(config, kernels, probed.exact)
    identity = replace(identity, kernels=kernels, bit_exact=probed.exact, results=probed.digest)
    sums = f"slab{spec.sum_slabs}"
    identity = replace(identity, kv_dtype=config.kv_dtype, drafter_weights=plan.digest, sums=sums)
    prefix = None
    if config.prefix_cache:
        prefix = PrefixCache(allocator, config.page_size, drafter.lookahead, identity.namespace())
    return ModelRunner(
        model,
        drafter,
        KvMemory(kv, allocator, prefix),
        attention,
        RunnerLimits(max_model_len, budget, config.acceptance, contents),
        identity,
        make_policy("fixed" if config.adaptive == "off" else config.adaptive, costs, drafter=drafter.name),
        capture_graphs(config, model, drafter, kv, attention, max_model_len + spec_slots) if graphs else None,
        grammars,
    )


def _tell_exactness(config: NodeConfig, kernels: str, exact: bool) -> None:
    log.info("kernels %s: this host is %s", kernels, "bit-exact" if exact else "NOT bit-exact")
    if config.exact_on_gpu and not exact:
        log.warning("bits: exact was asked for, and rows had other bits in other batches on this GPU: please report it")


def _attention(config: NodeConfig, model: TargetModel) -> AttentionBackend:
    spec = model.spec
    geometry = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    longest = config.max_model_len or spec.max_model_len
    special = spec.special_attention(longest)
    found = attention_for(model.device, *geometry, config.attention_wanted, special=special, longest=longest)
    if config.exact_on_gpu and not found.row_invariant:
        raise ConfigError("bits", f"attention {found.name!r} has bits that depend on the batch: set bits to fast")
    return found


def device_kernels(device: torch.device, attention: AttentionBackend, bits: str) -> str:
    """What makes the bits of a GPU node: the kind of GPU, the products, of torch or the exact ones, and attention. The
    host's processor has no part in them."""
    properties = torch.cuda.get_device_properties(device)
    return f"sm_{properties.major}{properties.minor}/{products_name(bits)}/{attention.kernels}"


def _max_model_len(config: NodeConfig, spec: ModelSpec, spec_slots: int) -> int:
    own = spec.max_model_len
    if config.max_model_len > own:
        raise ConfigError("max_model_len", f"{config.max_model_len} is more than the model's own {own}")
    longest = config.max_model_len or own
    fits = config.kv_cache_tokens - spec_slots
    if config.max_model_len > fits:
        raise ConfigError(
            "kv_cache_tokens",
            f"must hold max_model_len and {spec_slots} draft slots, so {config.max_model_len + spec_slots}",
        )
    return min(longest, fits)
