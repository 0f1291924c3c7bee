"""MiMo, which transformers does not have, against plain torch: the target, and its own MTP module as the drafter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from paceline.assembly.build import build_runner
from paceline.assembly.shipped import resolve_drafter
from paceline.attention.base import ForwardBatch, Segment
from paceline.config import NodeConfig
from paceline.kvcache.layout import KvLayout, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.models.base import ForwardContext
from paceline.models.registry import load_target
from paceline.spec_decode.heads.mtp import MtpModule, load_mtp, mtp_kv_layers
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.parity import TOKENS, VOCAB, logits_of, worst_difference
from tests.support.proposed import proposed_by
from tests.support.tiny_model import tiny_request

pytestmark = needs_kernels

HIDDEN, HEADS, KV_HEADS, DIM, WIDE, LAYERS, THETA = 64, 4, 2, 16, 96, 2, 640000.0
MODULE = "model.mtp_layers.0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with the names of MiMo-7B."""
    made = tmp_path_factory.mktemp("mimo")
    raw = {
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": DIM,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 256, "rope_theta": THETA, "rms_norm_eps": 1e-5,
        "attention_bias": True, "num_nextn_predict_layers": 1, "use_sliding_window": False, "sliding_window": None,
        "tie_word_embeddings": False, "eos_token_id": 2,
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(raw))
    vocab, kv = (VOCAB, HIDDEN), KV_HEADS * DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocab, "lm_head.weight": vocab}
    shapes["model.norm.weight"] = (HIDDEN,)
    shapes |= {f"{MODULE}.{n}_layernorm.weight": (HIDDEN,) for n in ("token", "hidden", "final")}
    shapes[f"{MODULE}.input_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    for at in (*(f"model.layers.{i}" for i in range(LAYERS)), MODULE):
        shapes |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        for name, out in (("q", HEADS * DIM), ("k", kv), ("v", kv)):
            shapes |= {f"{at}.self_attn.{name}_proj.weight": (out, HIDDEN), f"{at}.self_attn.{name}_proj.bias": (out,)}
        shapes |= {f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM), f"{at}.mlp.down_proj.weight": (HIDDEN, WIDE)}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (WIDE, HIDDEN) for name in ("gate", "up")}
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator) * 0.3
        tensors[name] = 1 + value if "norm" in name else value
    save_file(tensors, made / "model.safetensors")
    return made


class Plain:
    """The model written down again, without pages or kernels."""

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.tensors[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def layer(self, x: torch.Tensor, at: str) -> torch.Tensor:
        rows = len(x)
        angles = torch.arange(rows)[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def heads(name: str, rotated: bool) -> torch.Tensor:
            split = self.linear(normed, f"{at}.self_attn.{name}_proj").view(rows, -1, DIM)
            a, b = split.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) if rotated else split
            return turned.repeat_interleave(HEADS * DIM // turned.flatten(1).shape[1], dim=1)

        normed = self.norm(x, f"{at}.input_layernorm")
        scores = torch.einsum("qhd,khd->hqk", heads("q", True), heads("k", True)) / DIM**0.5
        scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), heads("v", False)).flatten(1)
        x = x + self.linear(mixed, f"{at}.self_attn.o_proj")
        normed = self.norm(x, f"{at}.post_attention_layernorm")
        gate, up = (self.linear(normed, f"{at}.mlp.{name}_proj") for name in ("gate", "up"))
        return x + self.linear(F.silu(gate) * up, f"{at}.mlp.down_proj")

    def stream(self, tokens: list[int]) -> torch.Tensor:
        """Before the final norm."""
        x = self.tensors["model.embed_tokens.weight"][tokens]
        for i in range(LAYERS):
            x = self.layer(x, f"model.layers.{i}")
        return x

    def module(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Row i: token i + 1 beside hidden row i, which comes first; after the module's own norm."""
        embedded = self.tensors["model.embed_tokens.weight"][tokens]
        pair = (self.norm(hidden, f"{MODULE}.hidden_layernorm"), self.norm(embedded, f"{MODULE}.token_layernorm"))
        x = self.linear(torch.cat(pair, dim=-1), f"{MODULE}.input_proj")
        return self.norm(self.layer(x, MODULE), f"{MODULE}.final_layernorm")


def test_target_and_module_are_those_of_plain_torch(folder: Path) -> None:
    plain = Plain(folder)
    hidden = plain.stream(TOKENS)
    logits = F.linear(plain.norm(hidden, "model.norm"), plain.tensors["lm_head.weight"])
    assert worst_difference(folder, logits) < 1e-4
    model = load_target(folder, torch.float32, torch.device("cpu"))
    (module,), _ = load_mtp(str(folder), model, 1, model.rope_table())
    kv = KvPool(KvLayout((*model.kv_layers, *mtp_kv_layers(model.kv_layers, 1)), torch.float32), 4, 16)
    assert kv.layout.layers[-1].owner is LayerOwner.DRAFT
    segment = Segment.linear(TOKENS[1:], 0, torch.arange(64, dtype=torch.int32))
    runner = build_runner(NodeConfig(model=str(folder), dtype="fp32", drafter="none", kv_cache_tokens=1024))
    context = ForwardContext.build(ForwardBatch.build([segment]), kv, runner.attention)
    got = module(model.embed(context.batch.token_ids), hidden[:-1], context)
    torch.testing.assert_close(got, plain.module(TOKENS[1:], hidden[:-1]), rtol=1e-4, atol=1e-4)
    assert logits_of(model, (45,)).std() > 0.5


def test_the_module_is_given_rows_before_the_final_norm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's MiMo gives them. Mutant: rows after it, which DeepSeek's modules read."""
    seen: list[torch.Tensor] = []
    call = MtpModule.__call__

    def keep(self: MtpModule, embedded: torch.Tensor, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        seen.append(hidden.clone())
        return call(self, embedded, hidden, context)

    request = tiny_request(max_tokens=2)
    config = NodeConfig(model=str(folder), dtype="fp32", kv_cache_tokens=1024, drafter="mtp", head_check=False)
    runner = build_runner(config)
    monkeypatch.setattr(MtpModule, "__call__", keep)
    run(runner, [request])
    prompt = list(request.prompt_token_ids)
    torch.testing.assert_close(seen[0], Plain(folder).stream(prompt)[: len(seen[0])], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("handoff", ["draft_kv", "hidden_states"])
async def test_apart_as_together(folder: Path, handoff: str) -> None:
    """What the module proposes on the decode node is what it proposes in one process. Mutants: hidden rows cross in
    another order; one draft row crosses in place of all."""
    requests = [tiny_request(index=i, max_tokens=12) for i in range(2)]
    options = {"drafter": "mtp", "num_draft_tokens": 3, "head_check": False, "handoff": handoff}
    shared = {"model": str(folder), "dtype": "bf16", "kv_cache_tokens": 2048, "prefill_chunk_tokens": 5}
    config = NodeConfig.model_validate(shared | options)
    alone, decode = build_runner(config), build_runner(config)
    proposed, apart = proposed_by(alone), proposed_by(decode)
    together = run(alone, requests)
    async with pair(config, build_runner(config, decodes=False), decode) as nodes:
        answers = await nodes.run(requests, concurrent=2)
        await nodes.all_released()
    assert [outcome for outcome, _ in answers] == together
    assert sorted(apart) == sorted(proposed) != []


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_its_own_module_drafts_and_changes_nothing(folder: Path, tree: str) -> None:
    """The checkpoint alone says that there is one."""
    requests = [tiny_request(index=i, max_tokens=16, temperature=0.7 * i) for i in range(2)]
    options: dict[str, object] = {"model": str(folder), "dtype": "bf16", "kv_cache_tokens": 2048}
    assert resolve_drafter(NodeConfig.model_validate(options)) == "mtp"
    plain = run(build_runner(NodeConfig.model_validate(options | {"drafter": "none"})), requests)
    heads = {"drafter": "mtp", "num_draft_tokens": 3, "tree": tree, "head_check": False}
    drafted = run(build_runner(NodeConfig.model_validate(options | heads)), requests, batch=2, chunk_tokens=7)
    assert [(d.token_ids, d.logit_bits) for d in drafted] == [(p.token_ids, p.logit_bits) for p in plain]
