"""Fitting a tree to a grammar keeps the law of every lossless rule, by exact enumeration (algorithms.md J1)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.engine.grammar_drafts import FitLimits, fitted
from paceline.grammar.compile import CompiledGrammar, GrammarCompiler
from paceline.grammar.cursor import GrammarCursor
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.table import PageTable
from paceline.request import Grammar, GrammarKind, SamplingParams, SequenceRequest
from paceline.spec_decode.accept.acceptance import RULES, Verification
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.enumerate_acceptance import DRAWN, ONE_HOT, Drafting, ScriptedCoins, TableRows
from tests.support.enumeration import Choose, Model, Probs, Tokens, deviation, normalised

LETTERS, EOS, VOCAB = "abc", 3, 4
LENGTH = 3
ROUNDING = 1e-6  # q is float32
GRAMMARS = ("[ab]c[ab]", "a[bc]{0,2}", "(ab|bc|cc)[ab]")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """Three letters and an end."""
    folder = tmp_path_factory.mktemp("letters")
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return GrammarCompiler(folder, VOCAB)


@dataclass
class MaskedModel(Model):
    """A target whose law a grammar masks; the drafter knows nothing of it."""

    grammar: CompiledGrammar | None = None
    masked: dict[Tokens, Probs] = field(default_factory=dict)

    def p(self, prefix: Tokens, history: Tokens | None = None) -> Probs:
        if prefix not in self.masked:
            assert self.grammar is not None
            mask = GrammarCursor(self.grammar).allowed(prefix).mask
            law = super().p(prefix, history)
            self.masked[prefix] = normalised([p if ok else 0.0 for p, ok in zip(law, mask, strict=True)])
        return self.masked[prefix]

    def q(self, prefix: Tokens) -> Probs:
        return Model.q(Model(self.vocab_size, self.seed), prefix)


def sequence_after(model: MaskedModel, prefix: Tokens) -> Sequence:
    params = SamplingParams(temperature=1.0, seed=0, stop_token_ids=(EOS,))
    seq = Sequence.start(SequenceRequest("r", (0,), params, prefix), PageTable(PageAllocator(1), 1))
    assert model.grammar is not None
    seq.grammar = GrammarCursor(model.grammar)
    return seq


Fit = Callable[[Sequence, DraftTree, FitLimits], DraftTree]


def deviation_of(
    model: MaskedModel, rule: str, drafting: Drafting, shape: str, *, keeps_draws: bool, fit: Fit = fitted
) -> float:
    """See ``deviation``, of rounds over fitted trees."""

    def round_(_: Model, prefix: Tokens, budget: int, choose: Choose) -> tuple[int, Tokens]:
        drafted = drafting.tree(model, prefix, shape, budget - 1, choose)
        tree = fit(sequence_after(model, prefix), drafted, FitLimits(9, budget - 1, keeps_draws))
        check_tree(model, prefix, tree, drafted)
        rows = TableRows(model, prefix, tree, choose)
        coins = ScriptedCoins(choose)
        verdict = RULES[rule].function(Verification(tree, rows, coins, len(prefix), EOS.__eq__, budget))
        return len(verdict.path), tuple(verdict.committed(tree))

    return deviation(round_, model, LENGTH, stop=EOS)


def check_tree(model: MaskedModel, prefix: Tokens, tree: DraftTree, drafted: DraftTree) -> None:
    """A forced token is the only child of its node; where children were not drawn, none is refused."""
    for node in range(1, tree.num_nodes):
        parent = tree.parents[node]
        path = tuple(tree.token_ids[i] for i in tree.path(parent)[1:])
        if tree.draft_probs is None:
            assert model.p(prefix + path)[tree.token_ids[node]] > 0.0
        siblings = [i for i in range(1, tree.num_nodes) if tree.parents[i] == parent]
        law = model.p(prefix + path) if all(model.p(prefix + path[:i])[t] for i, t in enumerate(path)) else ()
        if 1.0 in law and law.index(1.0) != EOS:
            assert [tree.token_ids[i] for i in siblings] == [law.index(1.0)]
    assert tree.token_ids[0] == drafted.token_ids[0]


CASES = (
    ("sample", ONE_HOT, "comb"),
    ("sample", DRAWN, "wide2"),
    ("rejection", ONE_HOT, "chain2"),
    ("rejection", DRAWN, "chain2"),
    ("recursive", ONE_HOT, "comb"),
    ("recursive", DRAWN, "chain2"),
    ("recursive", DRAWN, "wide2"),
)


@pytest.mark.parametrize("pattern", GRAMMARS)
@pytest.mark.parametrize(("rule", "drafting", "shape"), CASES)
def test_the_law_is_the_masked_target_s(
    compiler: GrammarCompiler, pattern: str, rule: str, drafting: Drafting, shape: str
) -> None:
    model = MaskedModel(VOCAB, 1, grammar=compiler.compile(Grammar(GrammarKind.REGEX, pattern)))
    assert deviation_of(model, rule, drafting, shape, keeps_draws=rule != "sample") < ROUNDING


def test_pruning_drawn_children_would_change_the_law(compiler: GrammarCompiler) -> None:
    """Algorithms.md B6: what is left of the draws is no draw from q."""

    def pruned(seq: Sequence, tree: DraftTree, limits: FitLimits) -> DraftTree:
        kept, laws = fitted(seq, replace(tree, draft_probs=None), limits), tree.draft_probs
        return kept if not laws else replace(kept, draft_probs=dict.fromkeys(range(kept.num_nodes), laws[0]))

    model = MaskedModel(VOCAB, 1, grammar=compiler.compile(Grammar(GrammarKind.REGEX, "[ab]{2}c?")))
    assert deviation_of(model, "recursive", DRAWN, "wide2", keeps_draws=True) < ROUNDING
    assert deviation_of(model, "recursive", DRAWN, "wide2", keeps_draws=True, fit=pruned) > 0.001
