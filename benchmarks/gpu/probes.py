"""Small questions that decide what comes next on a GPU: ``python -m benchmarks.gpu.probes --out FILE``.

Each probe answers one, and a probe that fails takes no other with it. The JSON is rewritten after every answer; what
another call has found stays in it.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import Bench, Options, plant
from benchmarks.gpu.clock import Clock, measure_ceilings
from benchmarks.gpu.report import Host
from benchmarks.speculation.synthetic import RATES
from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.flashinfer import FlashInferAttention
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.layers.graph_capture import CudaCapture
from paceline.models.moe import Experts, GroupedExperts, grouped
from paceline.triton_support import runs_triton

log = logging.getLogger(__name__)
Answer = dict[str, Any]
COLD_BYTES = 512 << 20  # a weight that was read so long ago is in no cache
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAGE = 16


@dataclass(frozen=True)
class Sizes:
    """A Llama-8B's layer, or something that a CPU does at once."""

    hidden: int
    widths: MappingProxyType[str, int]  # outputs of a layer's products
    experts: int
    expert_width: int
    rows: tuple[int, ...]
    prompt: int
    batches: tuple[int, ...]
    context: int
    shape: str

    @classmethod
    def of(cls, device: torch.device) -> Sizes:
        """What fits the device."""
        if device.type == "cuda":
            widths = MappingProxyType({"qkv": 6144, "o": 4096, "gate_up": 28672})
            return cls(4096, widths, 64, 1024, ROWS, 4096, (1, 64, 256), 2048, "llama-8b")
        return cls(64, MappingProxyType({"qkv": 96}), 4, 32, (1, 3), 64, (1,), 128, "tiny")


class Probes:
    """What is asked on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sample_s: float) -> None:
        self.device, self.dtype, self.sizes = device, dtype, Sizes.of(device)
        self.clock = Clock(device, sample_s)

    def machine(self) -> Answer:
        """Versions and both ceilings."""
        return {"host": asdict(Host.read(self.device)), "ceilings": asdict(measure_ceilings(self.clock, self.dtype))}

    def products(self) -> Answer:
        """Bytes of weights a second, of torch's product and of the exact one, by number of rows."""
        found: Answer = {}
        for name, width in self.sizes.widths.items():
            weight = torch.randn(width, self.sizes.hidden, device=self.device).to(self.dtype)
            for rows in self.sizes.rows:
                x = torch.randn(rows, self.sizes.hidden, device=self.device).to(self.dtype)
                found[f"{name} {rows} torch"] = self._rate(weight, partial(partial, F.linear, x))
                if runs_triton(self.device):
                    found[f"{name} {rows} exact"] = self._rate(weight, partial(_exact, x))
        return found

    def bits(self) -> Answer:
        """Whether torch's product gives a row the same bits among other rows and in other columns."""
        width, hidden = next(iter(self.sizes.widths.values())), self.sizes.hidden
        weight = torch.randn(width, hidden, device=self.device).to(self.dtype)
        x = torch.randn(max(self.sizes.rows), hidden, device=self.device).to(self.dtype)
        alone = F.linear(x[:1], weight)[0]
        half = width // 2
        return {
            "rows with other bits": [n for n in self.sizes.rows if not torch.equal(F.linear(x[:n], weight)[0], alone)],
            "half of the columns alone": torch.equal(F.linear(x[:1], weight[:half])[0], alone[:half]),
        }

    def experts(self) -> Answer:
        """Seconds of a layer's experts, eight of them a row: by torch's grouped product, that product alone, and by the
        exact products, which read and write rows where they lie."""
        sizes, found = self.sizes, Answer()
        made = _experts(sizes, self.dtype, self.device)
        exact = _exact_experts(made) if runs_triton(self.device) else None
        top_k = min(8, sizes.experts)
        for rows in sizes.rows:
            x = torch.randn(rows, sizes.hidden, device=self.device).to(self.dtype)
            ids = torch.rand(rows, sizes.experts, device=self.device).topk(top_k).indices
            found[f"{rows} rows, whole"] = self._seconds(partial(made.of_many, x, ids))
            if exact is not None:
                found[f"{rows} rows, exact"] = self._seconds(partial(exact, x, ids))
            flat = torch.randn(rows * top_k, sizes.hidden, device=self.device).to(self.dtype)
            ends = torch.linspace(0, rows * top_k, sizes.experts + 1, device=self.device)[1:].int()
            weights = made._gate_up
            found[f"{rows} rows, one product"] = self._seconds(partial(grouped, flat, weights, ends))
        return found

    def prompts(self) -> Answer:
        """Seconds of a layer's attention over a prompt: FlashInfer's kernels for Ampere and for Hopper."""
        if self.device.type != "cuda":
            return {"left out": "needs a GPU"}
        heads, kv_heads, dim, found = 32, 8, 128, Answer()
        pages = self.sizes.prompt // PAGE
        layout = KvLayout((KvLayer(LayerKind.GQA, LayerOwner.TARGET, kv_heads, dim),), self.dtype)
        kv = KvPool(layout, pages, PAGE, self.device)
        kv.data[0].normal_()
        slots = torch.arange(self.sizes.prompt, dtype=torch.int32)
        batch = ForwardBatch.build([Segment.linear([0] * self.sizes.prompt, 0, slots)], self.device)
        query = torch.randn(self.sizes.prompt, heads, dim, device=self.device).to(self.dtype)
        outputs = {}
        for name, hopper in (("fa2", False), ("fa3", True)):
            attention = FlashInferAttention(self.device, dim)
            attention.hopper = hopper
            plan = attention.plan(batch)
            attend = partial(attention.attend, query, kv, 0, plan, dim**-0.5)
            outputs[name], found[name] = attend(), self.clock.events(attend).median
        found["largest difference"] = float((outputs["fa2"] - outputs["fa3"]).abs().max())
        return found

    def profile(self) -> Answer:
        """Where a plain step's time is, by kernel."""
        from torch.profiler import ProfilerActivity, profile

        options = Options(str(self.device), _name(self.dtype), self.sizes.shape, "", 0, RATES["tau3"], False)
        bench = Bench(options, self.clock, measure_ceilings(self.clock, self.dtype), Path())
        found = Answer()
        for batch in self.sizes.batches:
            runner = bench.runner(self.sizes.shape, batch, self.sizes.context + 512, 0)
            seqs = plant(runner, batch, self.sizes.context)
            runner.decode(seqs)
            kinds = [ProfilerActivity.CUDA] if self.clock.on_gpu else [ProfilerActivity.CPU]
            with profile(activities=kinds) as profiler:
                runner.decode(seqs)
                self.clock.sync()
            by = "self_cuda_time_total" if self.clock.on_gpu else "self_cpu_time_total"
            found[f"batch {batch}"] = profiler.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=60)
            del runner, seqs
            bench.free()
        return found

    def _rate(self, weight: torch.Tensor, make: Callable[[torch.Tensor], Callable[[], object]]) -> float:
        """make: the product with a weight. It runs over copies of the weight that fit no cache."""
        num_bytes = weight.numel() * weight.element_size()
        works = [make(weight.clone()) for _ in range(max(-(-COLD_BYTES // num_bytes), 2) if self.clock.on_gpu else 2)]
        return num_bytes * len(works) / self._seconds(lambda: [work() for work in works])

    def _seconds(self, work: Callable[[], object]) -> float:
        """What the device alone takes: the host's launches are in a graph."""
        if not self.clock.on_gpu:
            return self.clock.events(work, repeats=10).median
        captured = CudaCapture(self.device)(lambda: (work(), ())[1])
        return self.clock.events(captured.replay, repeats=10).median


def _exact(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    from paceline.layers.exact_products import Matrices, product

    matrices = Matrices.of(weight)
    return lambda: product(x, matrices, None, x.dtype)


def _exact_experts(made: GroupedExperts) -> Experts:
    from paceline.layers.exact_products import Matrices
    from paceline.models.exact_experts import ExactExperts

    return ExactExperts(Matrices(made._gate_up), Matrices(made._down))


def _experts(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> GroupedExperts:
    shapes = {"gate_proj": (sizes.expert_width, sizes.hidden), "up_proj": (sizes.expert_width, sizes.hidden)}
    shapes["down_proj"] = (sizes.hidden, sizes.expert_width)

    def take(name: str) -> torch.Tensor:
        return torch.randn(*shapes[name.split(".")[-2]], device=device).to(dtype)

    return GroupedExperts(take, "mlp", sizes.experts)


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


NAMES = ("machine", "products", "bits", "experts", "prompts", "profile")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 when a probe failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.probes", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--only", choices=NAMES, nargs="+", default=NAMES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sample-seconds", type=float, default=1.0)
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    probes = Probes(device, torch.bfloat16 if device.type == "cuda" else torch.float32, given.sample_seconds)
    known = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else {}
    answers, failed = Answer(known), False
    for name in given.only:
        try:
            answers[name] = getattr(probes, name)()
        except Exception as error:
            log.exception("probe %s failed", name)
            answers[name], failed = {"FAILED": f"{type(error).__name__}: {error}"}, True
        given.out.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {'FAILED' if 'FAILED' in answers[name] else 'done'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    raise SystemExit(main())
