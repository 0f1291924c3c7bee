"""What ``--kv-dtype int8`` costs and gains: ``python -m benchmarks.kv8 MODEL [--text FILE] [--rounds N]``.

The text goes through the model twice, once with each KV cache. KL and agreement are of the next token's distribution at
every position; perplexities are of the text itself. With ``--rounds``, steps are timed too (``kv8_speed.py``).
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import kv8_speed
from benchmarks.common.console import bar, step
from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.select import attention_for
from paceline.kvcache.layout import KvLayout, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.layers.build import kernel_set, set_threads
from paceline.models.base import ForwardContext, TargetModel
from paceline.models.hub import resolve_model
from paceline.models.registry import DTYPES, load_target
from paceline.text.tokenizer import Tokenizer

CHUNK, PAGE = 256, 16


@dataclass(frozen=True)
class Compared:
    """Means over the positions of a text."""

    token_bytes: tuple[int, int]  # of the target's KV: as it is, in int8
    perplexity: tuple[float, float]
    kl: float  # nats, from the cache as it is to the one in int8
    agreement: float  # share of positions whose likeliest next token is the same


def log_probs(model: TargetModel, ids: list[int], layout: KvLayout, name: str) -> torch.Tensor:
    """float32 [len(ids), vocab_size]. name: of the cache, for who waits."""
    spec = model.spec
    attention = attention_for(model.device, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    kv = KvPool(layout, -(-len(ids) // PAGE), PAGE)
    slots, rows = torch.arange(len(ids), dtype=torch.int32), []
    with bar(f"text, KV cache {name}") as show:
        for start in range(0, len(ids), CHUNK):
            show(start, len(ids), "tokens")
            batch = ForwardBatch.build([Segment.linear(ids[start : start + CHUNK], start, slots)])
            rows.append(model.logits(model.forward(ForwardContext.build(batch, kv, attention))))
    return torch.cat(rows).log_softmax(-1)


@torch.inference_mode()
def compare(model: TargetModel, ids: list[int]) -> Compared:
    """Raises ConfigError for a model whose KV has no int8."""
    layouts = {name: KvLayout.of(model.kv_layers, model.dtype, name) for name in ("auto", "int8")}
    plain, coded = (log_probs(model, ids, layout, name) for name, layout in layouts.items())
    own, follows = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
    plain_ppl, coded_ppl = (float((-rows[own, follows]).mean().exp()) for rows in (plain, coded))
    plain_bytes, coded_bytes = (layout.token_bytes(LayerOwner.TARGET) for layout in layouts.values())
    return Compared(
        token_bytes=(plain_bytes, coded_bytes),
        perplexity=(plain_ppl, coded_ppl),
        kl=float((plain.exp() * (plain - coded)).sum(-1).mean()),
        agreement=float((plain.argmax(-1) == coded.argmax(-1)).float().mean()),
    )


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.kv8", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, help="file whose text both caches are compared over")
    parser.add_argument("--tokens", type=int, default=1792)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=0, help="of timed steps; 0 times none")
    parser.add_argument("--contexts", default="128,1024,4096", help="tokens, comma-separated")
    parser.add_argument("--rows", default="decode,tree,chunk", help="kinds of rows, comma-separated")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="file to write the times to")
    return parser.parse_args()


def main() -> None:
    """See the module docstring."""
    given = _parsed()
    folder = resolve_model(given.model)
    step(0, 1 + (given.text is not None) + (given.rounds > 0), "loading the model")
    model = load_target(folder, DTYPES[given.dtype], torch.device("cpu"))
    if given.text is not None:
        ids = Tokenizer.from_folder(folder).encode(given.text.read_text(encoding="utf-8"))[: given.tokens]
        found = compare(model, ids)
        print(f"KV of a token: {found.token_bytes[0]:,} -> {found.token_bytes[1]:,} bytes")
        print(f"perplexity of {len(ids)} tokens: {found.perplexity[0]:.2f} -> {found.perplexity[1]:.2f}")
        print(f"KL {found.kl:.5f} nats, the likeliest token agrees at {found.agreement:.1%} of positions")
    if given.rounds:
        set_threads(given.threads)
        contexts = [int(tokens) for tokens in given.contexts.split(",")]
        times = kv8_speed.measure(model, contexts, given.rows.split(","), given.rounds)
        kv8_speed.show(times)
        if given.json is not None:
            about = {"model": given.model, "threads": given.threads, "rounds": given.rounds, "kernels": kernel_set()}
            kept = about | {"times": [asdict(each) for each in times]}
            given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
