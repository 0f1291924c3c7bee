"""EAGLE-1 and EAGLE-3 heads (``--drafter eagle``, ``eagle3``) as ``FeatureDrafter``s."""

from __future__ import annotations

from paceline.attention.base import AttentionBackend
from paceline.attention.select import attention_for
from paceline.engine_config import EngineConfig
from paceline.errors import ConfigError
from paceline.kvcache.pool import KvPool
from paceline.models.base import TargetModel
from paceline.spec_decode.base import Drafter, DraftSampling
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.drafters.plan import DrafterPlan, budget_of, heads_folder
from paceline.spec_decode.drafters.row_exporter import RowExporter
from paceline.spec_decode.heads.detect import load_head
from paceline.spec_decode.heads.eagle import Eagle1Head, Eagle3Head
from paceline.spec_decode.trees.static_trees import EAGLE_TREE, RankPath
from paceline.speculation import TreeKind


def plan(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter."""
    folder = heads_folder(name, config)
    head, digest = load_head(folder, model, len(model.kv_layers))
    wanted = Eagle3Head if name == "eagle3" else Eagle1Head
    if not isinstance(head, wanted):
        raise ConfigError("drafter", f"{folder} holds a head of another kind than --drafter {name}")
    num_heads, layer = head.layer.shape.num_heads, head.kv_layers[0]

    def make(kv: KvPool, attention: AttentionBackend) -> Drafter:
        own = attention_for(model.device, num_heads, layer.num_kv_heads, layer.head_dim, config.attention_wanted)
        width, sampling = budget_of(config).tree_width, DraftSampling(config.draft_sampling)
        above = config.expand_above or None
        return FeatureDrafter(name, model, head, kv, own, width, sampling, _static_tree(config), above)

    return DrafterPlan(head.kv_layers, digest, make)


def export_fused_rows(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter: the rows of the layers that EAGLE-3 reads, fused by its ``fc`` or as they are."""
    head, digest = load_head(heads_folder(name, config), model, len(model.kv_layers))
    vocab, layers = model.spec.vocab_size, head.aux_layers
    if config.handoff_rows == "fused":
        fused = RowExporter(name, vocab, head.hidden_size, layers, head.fuse)
        return DrafterPlan((), digest, lambda kv, attention: fused)
    raw = RowExporter(name, vocab, len(layers) * model.spec.hidden_size, layers)
    return DrafterPlan((), "", lambda kv, attention: raw)


def _static_tree(config: EngineConfig) -> tuple[RankPath, ...]:
    """The fixed tree of EAGLE heads; deployments too narrow for it have the comb of their width."""
    widest = max(max(path) for path in EAGLE_TREE) + 1
    return EAGLE_TREE if config.tree is not TreeKind.CHAIN and config.tree_width >= widest else ()
