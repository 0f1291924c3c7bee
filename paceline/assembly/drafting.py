"""A deployment's drafter: the one that may have weights and state, with the others that a request may name."""

from __future__ import annotations

from paceline.assembly.shipped import resolve_drafter, with_real_drafter
from paceline.attention.base import AttentionBackend
from paceline.engine_config import EngineConfig
from paceline.errors import ConfigError
from paceline.kvcache.pool import KvPool
from paceline.models.base import TargetModel
from paceline.spec_decode.base import Drafter
from paceline.spec_decode.drafters.auto import AutoChooser
from paceline.spec_decode.drafters.plan import DrafterPlan, load_planner, plan_weightless
from paceline.spec_decode.drafters.row_exporter import RowExporter
from paceline.spec_decode.drafters.select import SelectingDrafter
from paceline.spec_decode.length.cost import CostTable
from paceline.speculation import AUTO, DRAFTERS, NONE

FALLBACK = "ngram"  # drafts for sequences that were handed over without draft state
BESIDE_AUTO = ("ngram", "suffix")  # what ``auto`` copies with, whatever else it was given


def plan_drafter(config: EngineConfig, model: TargetModel, costs: CostTable) -> DrafterPlan:
    """Load whatever weights the deployment's drafters need. Raises ConfigError naming the option."""
    config = with_real_drafter(config)
    primary_name = resolve_drafter(config)
    if config.expand_above and not DRAFTERS[primary_name].expands_by_value:
        growing = ", ".join(record.name for record in DRAFTERS.values() if record.expands_by_value)
        raise ConfigError("expand_above", f"is of {growing} trees, not of --drafter {primary_name}")
    primary = _plan(primary_name, config, model)
    others = [name for name in config.selectable if name not in (primary_name, AUTO, NONE)]
    if config.drafter == AUTO:
        others = list(dict.fromkeys([*others, *(n for n in BESIDE_AUTO if n != primary_name)]))
    stateful = not DRAFTERS[primary_name].weightless
    if not others and config.drafter != AUTO and NONE not in config.selectable and not stateful:
        return primary

    def make(kv: KvPool, attention: AttentionBackend) -> Drafter:
        wanted = dict.fromkeys([*others, FALLBACK] if stateful else others)
        beside = {name: _plan(name, config, model).make(kv, attention) for name in wanted}
        chooser = None
        if config.drafter == AUTO:
            copies = [n for n, record in DRAFTERS.items() if record.copies and n in (*others, primary_name)]
            chooser = AutoChooser(costs, NONE if primary_name in copies else primary_name, copies)
        default = AUTO if chooser is not None else primary_name
        fallback, patient = FALLBACK if stateful else None, config.adaptive != "off"
        return SelectingDrafter(primary.make(kv, attention), beside, default, chooser, fallback, patient=patient)

    return DrafterPlan(primary.kv_layers, primary.digest, make)


def plan_export(config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """What a prefill node has of the drafter when draft KV does not cross: nothing, or what reads out the hidden rows
    that the decode node's drafter wants."""
    name = resolve_drafter(config)
    export = DRAFTERS[name].export
    if config.handoff == "none" or not export:
        return plan_weightless(RowExporter(name, model.spec.vocab_size, 0))
    return load_planner(export)(name, config, model)


def _plan(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    return load_planner(DRAFTERS[name].plan)(name, config, model)
