"""What options, requests and drafters call by the same names: the kinds of draft trees, and the list of drafters.

A new drafter is a module of ``spec_decode/drafters`` and a record of ``DRAFTERS``. The list imports nothing, so that a
command line or a router can read it without torch; a drafter's module is imported when a node is to draft with it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

AUTO = "auto"  # per request and round, the best of several drafters
DEFAULT = "default"  # what is best for the model; assembly/shipped.py says what that is
NONE = "none"
GRAMMAR = "grammar"  # names the tokens that a grammar forces, in place of a drafter; nobody can ask for it
PREDICTION = "prediction"  # names tokens that the request itself predicted; it gives a text and no drafter's name


class TreeKind(enum.StrEnum):
    """Shape of the trees a drafter makes. A deployment with one of them can give those before it as well."""

    CHAIN = "chain"  # one candidate per depth
    STATIC = "static"  # the drafter's fixed shape: ranks per depth, decided before any draft
    DYNAMIC = "dynamic"  # expanded where the draft is confident (EAGLE-2, algorithms.md D3)


@dataclass(frozen=True)
class DrafterRecord:
    """One drafter. ``plan`` and ``export`` name functions (spec_decode/drafters/plan.py: PlanDrafter) as
    "module:function", the module relative to ``paceline.spec_decode.drafters`` where it begins with a dot."""

    name: str
    plan: str  # from options to the drafter
    export: str = ""  # what a prefill node sends hidden rows with; empty: the drafter reads none
    weightless: bool = False  # drafts from the tokens alone, so it may stand beside any other drafter
    copies: bool = False  # repeats what stood before; ``auto`` may ask it
    expands_by_value: bool = False  # its dynamic trees take ``expand_above``


_RECORDS = (  # ``auto`` prefers earlier ones: of those that copy, and of those whose heads it finds (algorithms.md L1)
    DrafterRecord(NONE, ".none:plan", weightless=True),
    DrafterRecord("ngram", ".ngram:plan", weightless=True, copies=True),
    DrafterRecord("suffix", ".suffix:plan", weightless=True, copies=True),
    DrafterRecord("trie", ".trie:plan", weightless=True, copies=True),
    DrafterRecord("lookahead", ".lookahead:plan", weightless=True),
    DrafterRecord("eagle3", ".eagle:plan", ".eagle:export_fused_rows", expands_by_value=True),
    DrafterRecord("mtp", ".mtp:plan", ".mtp:export", expands_by_value=True),
    DrafterRecord("eagle", ".eagle:plan", ".row_exporter:export_rows", expands_by_value=True),
    DrafterRecord("medusa", ".medusa:plan", ".row_exporter:export_rows"),
    DrafterRecord("draft_model", ".draft_model:plan"),
)
DRAFTERS: dict[str, DrafterRecord] = {record.name: record for record in _RECORDS}


def drafter_choices() -> tuple[str, ...]:
    """Every name that the option ``drafter`` takes."""
    return (DEFAULT, AUTO, *DRAFTERS)


def is_weightless(drafter: str | None) -> bool:
    """Whether a request that names ``drafter`` drafts from the tokens alone. None, for the deployment's own, is not."""
    return drafter in DRAFTERS and DRAFTERS[drafter].weightless
