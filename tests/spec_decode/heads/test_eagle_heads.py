"""EAGLE-1 and EAGLE-3 over the paged pool against plain torch, from files written by hand (algorithms.md C, F, J7)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.select import attention_for
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayout, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.models.base import AuxCapture, ForwardContext, TargetModel
from paceline.models.llama import LlamaModel
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.heads.base import DraftHead, LastRows
from paceline.spec_decode.heads.detect import load_head, read_head
from paceline.spec_decode.heads.eagle import Eagle3Head
from paceline.spec_decode.heads.formats.config import Eagle1Config, Eagle3Config, aux_config_ids, aux_input_layers
from paceline.spec_decode.heads.formats.write import write_eagle1, write_eagle3
from tests.support import head_files
from tests.support.exactness import run
from tests.support.head_files import DRAFT_IDS, HIDDEN, put
from tests.support.plain_heads import PlainTarget, read_and_run, read_plain
from tests.support.tiny_model import VOCAB, tiny_request, tiny_runner, tiny_spec, tiny_weights

LAYERS, PAGE, PAGES = 6, 4, 8
TOKENS = torch.tensor([5, 9, 3, 44, 17, 9, 3, 61, 80])  # t_1..t_9
DRAFTED = [31, 150, 4]
SLOTS = (torch.tensor([5, 2, 7, 0, 3])[:, None] * PAGE + torch.arange(PAGE)).flatten().int()  # pages in no order
Files = tuple[dict[str, Tensor], dict[str, Any]]

LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}
OUTPUTS: dict[str, Any] = {
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
}  # begins with 1: outputs, so inputs 2, 4, 6
EAGLE1: dict[str, Files] = {
    "plain": head_files.eagle1(),
    "bias": head_files.eagle1(bias=True),
    "scaled rope": head_files.eagle1(rope_scaling=LINEAR_ROPE),
}
EAGLE3: dict[str, Files] = {
    "plain": head_files.eagle3(),
    "norm_before_residual": head_files.eagle3(norm_before_residual=True),
    "norm_before_fc": head_files.eagle3(norm_before_fc=True),
    "fc_norm": head_files.eagle3(fc_norm=True),
    "norm_output": head_files.eagle3(norm_output=True),
    "all of them": head_files.eagle3(norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True),
    "whole vocabulary": head_files.eagle3(full_vocabulary=True),
    "another width": head_files.eagle3(hidden=48),
    "biases": head_files.eagle3(attention_bias=True),
    "qwen3": head_files.eagle3(model_type="qwen3"),
    "scaled rope": head_files.eagle3(rope_scaling=LINEAR_ROPE),
    "two aux layers": head_files.eagle3(num_aux=2, eagle_aux_hidden_state_layer_ids=[2, 4]),
    "aux outputs": head_files.eagle3(**OUTPUTS),
}


def target(dtype: torch.dtype = torch.float32) -> LlamaModel:
    spec = tiny_spec(num_layers=LAYERS)
    return LlamaModel(spec, tiny_weights(spec, dtype), dtype, torch.device("cpu"))


def plain_target(model: LlamaModel) -> PlainTarget:
    return PlainTarget(model.embedding.float(), model.embedding.float())  # tied


class Stand:
    """A head of a target over a pool of its own; rows of one sequence, fed in any chunks."""

    def __init__(self, model: LlamaModel, head: DraftHead) -> None:
        self.model, self.head = model, head
        self.kv = KvPool(KvLayout((*model.kv_layers, *head.kv_layers), model.dtype), PAGES, PAGE)
        layer = head.kv_layers[0]
        self.attention = attention_for(model.device, head_files.HEADS, layer.num_kv_heads, layer.head_dim)

    def context(self, *segments: Segment) -> ForwardContext:
        return ForwardContext.build(ForwardBatch.build(segments), self.kv, self.attention)

    def rows(self, tokens: Tensor, hidden: Tensor, start: int = 0) -> Tensor:
        context = self.context(Segment.linear(tokens.tolist(), start, SLOTS))
        return self.head.forward(context.batch.token_ids, hidden, context)

    def steps(self, tokens: Tensor, hidden: Tensor, drafted: list[int], chunks: tuple[int, ...]) -> Tensor:
        outputs, at = [], 0
        for size in chunks:
            outputs.append(self.rows(tokens[at : at + size], hidden[at : at + size], at))
            at += size
        for token in drafted:
            outputs.append(self.rows(torch.tensor([token]), outputs[-1][-1:], at))
            at += 1
        return torch.cat(outputs)

    def logits(self, output: Tensor) -> Tensor:
        """Over the target's ids, -inf outside the draft vocabulary."""
        scores = self.head.logits(output)
        if self.head.token_map is None:
            return scores
        every = torch.full((output.shape[0], VOCAB), -torch.inf)
        every[:, self.head.token_map] = scores
        return every


def loaded(folder: Path, model: TargetModel) -> DraftHead:
    return load_head(folder, model, len(model.kv_layers))[0]


def close(ours: Tensor, wanted: Tensor) -> bool:
    """To 1e-5 of the largest value, or of 1."""
    assert ours.shape == wanted.shape
    return bool((ours - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max())))


def differences(kind: str, folder: Path) -> list[str]:
    """Where outputs or logits of true and drafted rows, in two chunkings, are not those of plain torch on the same
    files."""
    model = target()
    plain = read_plain(kind, folder, plain_target(model))
    head = loaded(folder, model)
    assert head.kv_layers[0].owner is LayerOwner.DRAFT
    torch.manual_seed(1)
    rows = torch.randn(len(TOKENS), HIDDEN * max(1, len(head.aux_layers))) * 2.0
    fused, expected_fused = head.fuse(rows), plain.fuse(rows)
    found = [] if close(fused, expected_fused) else ["fused rows"]
    expected = plain.steps(TOKENS, expected_fused, DRAFTED)
    for chunks in ((9,), (5, 1, 3)):
        stand = Stand(model, head)
        kept = fused.clone()
        outputs = stand.steps(TOKENS, fused, DRAFTED, chunks)
        ours, wanted = stand.logits(outputs), plain.logits(expected)
        reached = wanted > -torch.inf
        holds = {
            "the rows it was given": torch.equal(fused, kept),
            "outputs": close(outputs, expected),
            "which tokens it can draft": torch.equal(ours > -torch.inf, reached),
            "logits": close(ours[reached], wanted[reached]),
        }
        found += [f"{what}, in chunks of {chunks}" for what, held in holds.items() if not held]
    direct = read_and_run(kind, folder, TOKENS, rows, plain_target(model))
    assert torch.equal(direct, plain.logits(plain.rows(TOKENS, expected_fused)))
    return found


@pytest.mark.parametrize("case", EAGLE1)
def test_eagle1_against_plain(case: str, tmp_path: Path) -> None:
    assert differences("eagle1", put(tmp_path, *EAGLE1[case])) == []
    assert differences("eagle1", put(tmp_path / "torch", *EAGLE1[case], file="pytorch_model.bin")) == []


@pytest.mark.parametrize("case", EAGLE3)
def test_eagle3_against_plain(case: str, tmp_path: Path) -> None:
    assert differences("eagle3", put(tmp_path, *EAGLE3[case])) == []
    assert differences("eagle3", put(tmp_path / "speculators", *head_files.speculators(*EAGLE3[case]))) == []


@pytest.mark.parametrize("case", [*EAGLE1, *EAGLE3])
def test_written_heads_run_the_same(case: str, tmp_path: Path) -> None:
    """read, write, read: the same bf16 tensors and config, and the same outputs as plain torch on the written files."""
    for kind, cases in (("eagle1", EAGLE1), ("eagle3", EAGLE3)):
        if case not in cases:
            continue
        first = read_head(put(tmp_path / kind, *cases[case]), torch.bfloat16)
        folder = tmp_path / f"{kind}-again"
        if isinstance(first.config, Eagle1Config):
            write_eagle1(folder, first.tensors, first.config)
        else:
            assert isinstance(first.config, Eagle3Config)
            write_eagle3(folder, first.tensors, first.config)
        second = read_head(folder, torch.bfloat16)
        assert second.config == first.config
        assert set(second.tensors) == set(first.tensors)
        assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
        assert differences(kind, folder) == []


def test_embedding_of_the_target_is_shared_and_another_kept(tmp_path: Path) -> None:
    model = target()
    tensors, config = head_files.eagle1()
    own = loaded(put(tmp_path / "own", tensors, config), model)
    copied = loaded(put(tmp_path / "copy", tensors | {"embed_tokens.weight": model.embedding}, config), model)
    del tensors["embed_tokens.weight"]
    absent = loaded(put(tmp_path / "absent", tensors, config), model)
    rows = torch.randn(len(TOKENS), HIDDEN)
    with_own, with_copy, without = (Stand(model, head).rows(TOKENS, rows) for head in (own, copied, absent))
    assert torch.equal(with_copy, without)
    assert not torch.allclose(with_own, without)
    assert copied.embedding.own is None  # type: ignore[attr-defined]  # no second table in memory


# ---- the vocabulary map


def test_offsets_become_ids(tmp_path: Path) -> None:
    head = loaded(put(tmp_path, *EAGLE3["plain"]), target())
    assert head.token_map is not None
    assert head.token_map.tolist() == DRAFT_IDS
    assert loaded(put(tmp_path / "whole", *EAGLE3["whole vocabulary"]), target()).token_map is None


def test_ids_in_place_of_offsets_are_refused(tmp_path: Path) -> None:
    tensors, config = EAGLE3["plain"]
    for ids in ({"d2t": torch.tensor(DRAFT_IDS)}, {"t2d": ~tensors["t2d"]}):
        with pytest.raises(ConfigError, match="offsets"):
            load_head(put(tmp_path, tensors | ids, config), target(), LAYERS)
    alone = {name: tensor for name, tensor in tensors.items() if name != "t2d"} | {"d2t": torch.tensor([200] * 10)}
    with pytest.raises(ConfigError, match="offsets"):
        load_head(put(tmp_path, alone, config), target(), LAYERS)


def test_a_map_without_its_mask(tmp_path: Path) -> None:
    tensors, config = EAGLE3["plain"]
    alone = {name: tensor for name, tensor in tensors.items() if name not in ("t2d", "d2t")}
    head = loaded(put(tmp_path, alone | {"draft_id_to_target_id": tensors["d2t"].int()}, config), target())
    assert head.token_map is not None
    assert head.token_map.tolist() == DRAFT_IDS


# ---- which layers


def test_aux_rows_are_the_layers_inputs(tmp_path: Path) -> None:
    """Against transformers, whose hidden_states[i] is the input of layer i; one layer off is told apart."""
    import transformers

    model = target()
    spec = model.spec
    config = transformers.LlamaConfig(
        **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5},
        **{"tie_word_embeddings": True, "max_position_embeddings": 512},
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    weights = tiny_weights(spec, torch.float32)
    state = {name: weights.take(name) for name in reference.state_dict() if name != "lm_head.weight"}
    reference.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    with torch.inference_mode():
        states = reference(TOKENS[None], output_hidden_states=True).hidden_states
    for case, wanted in (("plain", (2, 3, 3)), ("two aux layers", (2, 4)), ("aux outputs", (2, 4, 6))):
        head = loaded(put(tmp_path / case, *EAGLE3[case]), model)
        assert head.aux_layers == wanted
        aux = AuxCapture(head.aux_layers)
        stand = Stand(model, head)
        model.forward(stand.context(Segment.linear(TOKENS.tolist(), 0, SLOTS)), aux)
        assert head.fuse(aux.rows()).shape == (len(TOKENS), HIDDEN)
        for layer, rows in zip(wanted, aux.rows().chunk(len(wanted), dim=-1), strict=True):
            if layer == LAYERS:  # transformers norms its last one
                rows = torch.nn.functional.rms_norm(rows, (64,), state["model.norm.weight"], 1e-5)
            tolerance = 1e-4 * states[layer][0].abs().max()
            assert (rows - states[layer][0]).abs().max() < tolerance
            for off in {layer - 1, layer + 1} & set(range(LAYERS)):
                assert (rows - states[off][0]).abs().max() > 100 * tolerance


def test_both_conventions_of_layer_lists() -> None:
    assert aux_input_layers(None) is None
    assert aux_input_layers([1, 29, 57]) == (2, 30, 58)  # outputs: SpecForge
    assert aux_input_layers([2, 30, 58]) == (2, 30, 58)  # inputs: speculators
    assert aux_input_layers([24, 30, 36]) == (24, 30, 36)
    for layers in ((2, 15, 27), (0, 3), (3, 9, 27)):
        assert aux_input_layers(aux_config_ids(layers)) == layers
    with pytest.raises(ConfigError, match="aux layers"):
        aux_config_ids((1, 2, 3))
    for wrong in ([], [1, "2"], 3, [-1, 2]):
        with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids"):
            aux_input_layers(wrong)


# ---- what does not fit the target


def test_misfits_are_refused(tmp_path: Path) -> None:
    model = target()
    tensors, config = head_files.eagle3(eagle_aux_hidden_state_layer_ids=[2, 3, LAYERS + 1])
    with pytest.raises(ConfigError, match="reads layers"):
        load_head(put(tmp_path, tensors, config), model, LAYERS)
    wide = replace(model.spec, hidden_size=128)
    other = LlamaModel(wide, tiny_weights(wide, torch.float32), torch.float32, torch.device("cpu"))
    for files in (EAGLE1["plain"], EAGLE3["plain"]):
        with pytest.raises(ConfigError, match="target of width 64, not 128"):
            load_head(put(tmp_path, *files), other, LAYERS)
    small = replace(model.spec, vocab_size=100)
    few = LlamaModel(small, tiny_weights(small, torch.float32), torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="drafts token 198, the target has 100"):
        load_head(put(tmp_path, *EAGLE3["plain"]), few, LAYERS)
    tensors, config = head_files.eagle3(hidden=48)
    del tensors["embed_tokens.weight"]
    with pytest.raises(ConfigError, match="embed_tokens"):
        load_head(put(tmp_path, tensors, config), model, LAYERS)


# ---- bits


@pytest.mark.parametrize("case", ["eagle1", "plain", "all of them", "another width"])
def test_rows_alone_and_together_have_equal_bits(case: str, tmp_path: Path) -> None:
    model = target(torch.bfloat16)
    files = EAGLE1["bias"] if case == "eagle1" else EAGLE3[case]
    head = loaded(put(tmp_path, *files), model)
    rows = torch.randn(len(TOKENS), HIDDEN * max(1, len(head.aux_layers))).bfloat16()
    together = Stand(model, head).steps(TOKENS, head.fuse(rows), DRAFTED, (9,))
    assert together.dtype is torch.bfloat16
    alone_fused = torch.cat([head.fuse(row[None]) for row in rows])
    alone = Stand(model, head).steps(TOKENS, alone_fused, DRAFTED, (1,) * 9)
    assert torch.equal(together, alone)
    logits = head.logits(together)
    assert logits.dtype is torch.float32
    assert torch.equal(logits, torch.cat([head.logits(row[None]) for row in together]))


@pytest.mark.parametrize("case", [*EAGLE1, *EAGLE3])
def test_outputs_that_are_left_out_change_no_other_and_no_kv(case: str, tmp_path: Path) -> None:
    model = target(torch.bfloat16)
    head = loaded(put(tmp_path, *(EAGLE1 if case in EAGLE1 else EAGLE3)[case]), model)
    others = (torch.tensor([1, 4, 6])[:, None] * PAGE + torch.arange(PAGE)).flatten().int()
    prompts = ((TOKENS.tolist()[:7], SLOTS), (TOKENS.tolist()[2:5], others))
    segments = [Segment.linear(tokens, 0, slots) for tokens, slots in prompts]
    ends = [Segment.linear(tokens[-1:], len(tokens) - 1, slots) for tokens, slots in prompts]
    fused = head.fuse(torch.randn(10, HIDDEN * max(1, len(head.aux_layers))).bfloat16())
    whole, short = Stand(model, head), Stand(model, head)
    context = whole.context(*segments)
    outputs = head.forward(context.batch.token_ids, fused.clone(), context)
    last = LastRows(torch.tensor([6, 9]), short.context(*ends))
    assert torch.equal(head.extend(ForwardBatch.build(segments), fused.clone(), last), outputs[[6, 9]])
    assert torch.equal(short.kv.data[LAYERS], whole.kv.data[LAYERS])
    assert whole.kv.data[LAYERS].count_nonzero() > 0


def test_tree_rows_see_their_own_path_only(tmp_path: Path) -> None:
    """Two children of one row, in one forward with it, equal each path run alone."""
    model = target(torch.bfloat16)
    head = loaded(put(tmp_path, *EAGLE3["plain"]), model)
    assert isinstance(head, Eagle3Head)
    hidden = torch.randn(len(TOKENS) + 3, HIDDEN).bfloat16()
    stand, m = Stand(model, head), len(TOKENS)
    stand.rows(TOKENS, hidden[:m])
    context = stand.context(Segment.tree([31, 150, 4], [-1, 0, 0], m, SLOTS))
    tree = head.forward(context.batch.token_ids, hidden[m:], context)
    for node, token in ((1, 150), (2, 4)):
        path = Stand(model, head)
        path.rows(TOKENS, hidden[:m])
        rows = torch.cat((hidden[m : m + 1], hidden[m + node : m + node + 1]))
        assert torch.equal(path.rows(torch.tensor([31, token]), rows, m)[1], tree[node])


# ---- served


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("case", ["eagle1", "eagle3"])
def test_the_text_is_that_of_plain_decoding(case: str, tree: str, tmp_path: Path) -> None:
    """Tokens and logits, in bits, at both temperatures; drafts of a random head, so nearly all are refused."""
    aux: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}  # of the two layers there are
    files = EAGLE1["plain"] if case == "eagle1" else head_files.eagle3(**aux)
    folder = put(tmp_path, *files)
    requests = [tiny_request(index=i, max_tokens=12, temperature=float(i % 2)) for i in range(4)]
    options: dict[str, Any] = {"drafter": "ngram", "prefix_cache": False, "num_draft_tokens": 3}
    plain = run(tiny_runner("bf16", **(options | {"num_draft_tokens": 0})), requests)
    runner = tiny_runner("bf16", tree=tree, tree_width=1 if tree == "chain" else 2, **options)
    head = loaded(folder, runner.model)
    layout = KvLayout((*runner.model.kv_layers, *head.kv_layers), runner.dtype)
    runner.kv = KvPool(layout, runner.kv.num_pages, runner.kv.page_size)
    runner.drafter = FeatureDrafter(case, runner.model, head, runner.kv, runner.attention, 2)
    served = run(runner, requests, batch=4, chunk_tokens=5)
    assert [(o.token_ids, o.logit_bits) for o in served] == [(o.token_ids, o.logit_bits) for o in plain]
    assert all(outcome.accepted_per_round for outcome in served)
