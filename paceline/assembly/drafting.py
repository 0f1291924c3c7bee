"""From options to a drafter: its KV layers first, since they are part of the pool, then itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.assembly.shipped import resolve_drafter, shipped_heads, with_real_drafter
from paceline.attention.base import AttentionBackend
from paceline.attention.select import attention_for
from paceline.config import WEIGHTLESS_DRAFTERS, EngineConfig
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayer
from paceline.kvcache.pool import KvPool
from paceline.models.base import TargetModel
from paceline.models.hub import resolve_model
from paceline.models.registry import holds_mtp
from paceline.spec_decode.base import DraftBudget, Drafter, DraftSampling, TreeKind
from paceline.spec_decode.drafters.auto import AUTO, NONE, AutoChooser
from paceline.spec_decode.drafters.draft_model import DraftModelDrafter
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.drafters.lookahead import LookaheadDrafter
from paceline.spec_decode.drafters.medusa import MedusaDrafter, MedusaHeads
from paceline.spec_decode.drafters.mtp import MtpDrafter
from paceline.spec_decode.drafters.ngram import NgramDrafter
from paceline.spec_decode.drafters.none import NoDrafter
from paceline.spec_decode.drafters.row_exporter import RowExporter
from paceline.spec_decode.drafters.select import SelectingDrafter
from paceline.spec_decode.drafters.suffix import SuffixDrafter
from paceline.spec_decode.drafters.trie import TrieDrafter
from paceline.spec_decode.heads.detect import load_head, read_head
from paceline.spec_decode.heads.draft_model import load_draft_model
from paceline.spec_decode.heads.eagle import Eagle1Head, Eagle3Head
from paceline.spec_decode.heads.formats.config import HeadKind
from paceline.spec_decode.heads.mtp import MtpHead, load_mtp, mtp_kv_layers
from paceline.spec_decode.length.cost import CostTable
from paceline.spec_decode.trees.static_trees import EAGLE_TREE, RankPath

log = logging.getLogger(__name__)

FALLBACK = "ngram"  # drafts for sequences that were handed over without draft state
GROWS_BY_VALUE = ("eagle", "eagle3", "mtp")  # their dynamic trees take --expand-above
Make = Callable[[KvPool, AttentionBackend], Drafter]


@dataclass(frozen=True)
class DrafterPlan:
    """A drafter about to be: what it adds to the pool, what a peer must match, how to make it."""

    kv_layers: tuple[KvLayer, ...]
    digest: str
    make: Make


def budget_of(config: EngineConfig) -> DraftBudget:
    """The largest tree of a deployment."""
    width = 1 if config.tree == "chain" else config.tree_width
    return DraftBudget(
        config.num_draft_tokens, width, TreeKind(config.tree), config.nodes_budget, config.min_confidence
    )


def plan_drafter(config: EngineConfig, model: TargetModel, costs: CostTable) -> DrafterPlan:
    """Load whatever weights the deployment's drafters need. Raises ConfigError naming the option."""
    config = with_real_drafter(config)
    primary_name = resolve_drafter(config)
    if config.expand_above and primary_name not in GROWS_BY_VALUE:
        raise ConfigError("expand_above", f"is of {', '.join(GROWS_BY_VALUE)} trees, not of --drafter {primary_name}")
    primary = _plan_primary(primary_name, config, model)
    others = [name for name in config.selectable if name not in (primary_name, AUTO, NONE)]
    if config.drafter == AUTO:
        others = list(dict.fromkeys([*others, *(n for n in ("ngram", "suffix") if n != primary_name)]))
    stateful = primary_name not in WEIGHTLESS_DRAFTERS
    if not others and config.drafter != AUTO and NONE not in config.selectable and not stateful:
        return primary

    def make(kv: KvPool, attention: AttentionBackend) -> Drafter:
        first = primary.make(kv, attention)
        beside = {name: _weightless(name, model) for name in others}
        chooser = None
        if config.drafter == AUTO:
            copies = [name for name in ("ngram", "suffix", "trie") if name in beside or name == primary_name]
            head = primary_name if primary_name not in copies else NONE
            chooser = AutoChooser(costs, head, copies=copies)
        default = AUTO if chooser is not None else primary_name
        if stateful:
            beside.setdefault(FALLBACK, _weightless(FALLBACK, model))
        fallback, patient = FALLBACK if stateful else None, config.adaptive != "off"
        return SelectingDrafter(first, beside, default, chooser, fallback, patient=patient)

    return DrafterPlan(primary.kv_layers, primary.digest, make)


def plan_export(config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """What a prefill node has of the drafter when draft KV does not cross: nothing, or what reads out the hidden rows
    that the decode node's drafter wants."""
    name, spec = resolve_drafter(config), model.spec
    rowless = (*WEIGHTLESS_DRAFTERS, "draft_model")  # a draft model's prompt rows need tokens alone
    width = 0 if config.handoff == "none" or name in rowless else spec.hidden_size
    exporter, digest = RowExporter(name, spec.vocab_size, width), ""
    if width and name == "eagle3":
        head, found = load_head(_folder(name, config), model, len(model.kv_layers))
        layers = head.aux_layers
        if config.handoff_rows == "fused":
            exporter, digest = RowExporter(name, spec.vocab_size, head.hidden_size, layers, head.fuse), found
        else:
            exporter = RowExporter(name, spec.vocab_size, len(layers) * width, layers)
    return DrafterPlan((), digest, lambda kv, attention: exporter)


def _plan_primary(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    if name in ("none", "ngram", "suffix", "trie", "lookahead"):
        return DrafterPlan((), "", lambda kv, attention: _weightless(name, model))
    builders: dict[str, Callable[[str, EngineConfig, TargetModel], DrafterPlan]] = {
        "mtp": _mtp,
        "eagle": _feature,
        "eagle3": _feature,
        "medusa": _medusa,
        "draft_model": _draft_model,
    }
    return builders[name](name, config, model)


def _weightless(name: str, model: TargetModel) -> Drafter:
    spec = model.spec
    made: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "ngram": lambda: NgramDrafter(spec.vocab_size),
        "suffix": lambda: SuffixDrafter(spec.vocab_size),
        "trie": lambda: TrieDrafter(spec.vocab_size),
        "lookahead": lambda: LookaheadDrafter(spec.vocab_size, spec.eos_token_ids),
    }
    return made[name]()


def _width(config: EngineConfig) -> int:
    return budget_of(config).tree_width


def _sampling(config: EngineConfig) -> DraftSampling:
    return DraftSampling(config.draft_sampling)


def _static_tree(config: EngineConfig) -> tuple[RankPath, ...]:
    """The fixed tree of EAGLE heads; deployments too narrow for it have the comb of their width."""
    widest = max(max(path) for path in EAGLE_TREE) + 1
    return EAGLE_TREE if config.tree != "chain" and config.tree_width >= widest else ()


def _threshold(config: EngineConfig) -> float | None:
    return config.expand_above or None


def _folder(name: str, config: EngineConfig) -> Path:
    if config.drafter_path:
        return Path(config.drafter_path)
    found = shipped_heads(config.model, name)
    if found is None:
        raise ConfigError("drafter_path", f"no {name} heads ship for {config.model}: give their folder")
    return found


def _mtp(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    path = str(_mtp_folder(config, model) or "")
    if not path:
        log.warning("no --drafter-path: MTP heads are untrained; the text is right, but almost no draft is accepted")
    modules, digest = load_mtp(path, model, config.mtp_modules, model.rope_table())
    if config.expand_above and len(modules) > 1:
        raise ConfigError("expand_above", "chained MTP modules draft no dynamic trees")
    layers = mtp_kv_layers(model.kv_layers, len(modules))

    def make(kv: KvPool, attention: AttentionBackend) -> Drafter:
        width, sampling = _width(config), _sampling(config)
        if len(modules) == 1:
            head, above = MtpHead(model, modules[0]), _threshold(config)
            return FeatureDrafter("mtp", model, head, kv, attention, width, sampling, expand_above=above)
        return MtpDrafter(model, modules, kv, attention, width, sampling)

    return DrafterPlan(layers, digest, make)


def _mtp_folder(config: EngineConfig, model: TargetModel) -> Path | None:
    """Modules that were given, that ship in this number, or that lie in the target's own checkpoint."""
    if config.drafter_path:
        return Path(config.drafter_path)
    name = "mtp" if config.mtp_modules == 1 else f"mtp{config.mtp_modules}"
    own = resolve_model(config.model) if model.spec.num_mtp_modules else None
    return shipped_heads(config.model, name) or (own if own and holds_mtp(own, model.spec) else None)


def _feature(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    folder = _folder(name, config)
    head, digest = load_head(folder, model, len(model.kv_layers))
    wanted = Eagle3Head if name == "eagle3" else Eagle1Head
    if not isinstance(head, wanted):
        raise ConfigError("drafter", f"{folder} holds a head of another kind than --drafter {name}")
    num_heads, layer = head.layer.shape.num_heads, head.kv_layers[0]

    def make(kv: KvPool, attention: AttentionBackend) -> Drafter:
        own = attention_for(model.device, num_heads, layer.num_kv_heads, layer.head_dim, config.attention)
        width, tree, above = _width(config), _static_tree(config), _threshold(config)
        return FeatureDrafter(name, model, head, kv, own, width, _sampling(config), tree, above)

    return DrafterPlan(head.kv_layers, digest, make)


def _medusa(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    folder = _folder(name, config)
    found = read_head(folder, model.dtype, model.device)
    if found.kind is not HeadKind.MEDUSA:
        raise ConfigError("drafter", f"{folder} holds {found.kind} weights, not those of --drafter medusa")
    heads = MedusaHeads(model, found.tensors)

    def make(kv: KvPool, attention: AttentionBackend) -> Drafter:
        return MedusaDrafter(model, heads, _width(config), None, _sampling(config))

    return DrafterPlan((), found.digest, make)


def _draft_model(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    if not config.drafter_path:
        raise ConfigError("drafter_path", "the draft model's folder or name is needed")
    draft, digest = load_draft_model(config.drafter_path, model, len(model.kv_layers))

    def make(kv: KvPool, attention: AttentionBackend) -> Drafter:
        spec = draft.spec
        own = attention_for(model.device, spec.num_heads, spec.num_kv_heads, spec.head_dim, config.attention)
        first = len(model.kv_layers)
        return DraftModelDrafter(model, draft, kv, own, first, _width(config), _sampling(config))

    return DrafterPlan(draft.kv_layers, digest, make)
