"""``paceline plan``: what a model would take, before its weights are fetched or read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.assembly.model_plan import ModelPlan

GIB, KIB = 2**30, 2**10
MODEL = "A model folder, a GGUF file, or a JSON file that lists a checkpoint's tensors."
MAX_CONTEXT = 2**31
Degree = Annotated[int, typer.Option("--tp", help="Ranks that share the model; memory is printed for one of them.")]
Pools = Annotated[int, typer.Option("--attention-dp", help="Pools of a node: 1, or one on each rank, as in serve.")]
Context = Annotated[int, typer.Option(help="Tokens of context to hold; 0 for the longest that the model takes.")]
PageSize = Annotated[int, typer.Option(help="Tokens of a page, as in serve.")]
Dtype = Annotated[Literal["bf16", "fp32"], typer.Option(help="Number format of weights and KV, as in serve.")]

Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to compute, as in serve: a GPU unpacks MXFP4.")]
KvDtype = Annotated[Literal["auto", "int8"], typer.Option(help="Number format of the KV cache, as in serve.")]


def plan(
    model: Annotated[Path, typer.Argument(help=MODEL)],
    tp: Degree = 1,
    attention_dp: Pools = 1,
    context: Context = 0,
    page_size: PageSize = 16,
    dtype: Dtype = "bf16",
    kv_dtype: KvDtype = "auto",
    device: Device = "cpu",
) -> None:
    """Say what a model takes: memory by part, KV of a token, pages of a context, its drafter. Reads no weights."""
    from paceline.assembly.model_plan import plan_model
    from paceline.models.registry import DTYPES
    from paceline.ranks.degrees import check_pools

    if page_size < 1 or not 0 <= context <= MAX_CONTEXT:
        raise ConfigError("page_size" if page_size < 1 else "context", "must be a positive number")
    found = plan_model(model, DTYPES[dtype], kv_dtype, device == "cuda")
    found.check_degree(tp)
    check_pools(attention_dp, tp, found.spec)
    if attention_dp > 1:
        found = found.dealt(tp)
    for line in lines_of(found, tp, context, page_size):
        typer.echo(line)


def lines_of(found: ModelPlan, degree: int, context: int, page_size: int) -> list[str]:
    """What the command prints."""
    spec = found.spec
    longest = context or spec.max_model_len
    pages = -(-longest // page_size)
    kv = found.kv_bytes(degree)
    lines = [f"{spec.family}: {found.num_tensors} tensors, each taken once"]
    lines += [f"refused when served: {refusal}" for refusal in found.refusals]
    rows = [(part.name, part.num_bytes, part.of_rank(degree)) for part in found.parts]
    rows.append(("all weights", sum(part.num_bytes for part in found.parts), found.weight_bytes(degree)))
    for name, whole, rank in rows:
        share = f"   rank 0 of {degree}: {rank / GIB:8.2f} GiB" if degree > 1 else ""
        lines.append(f"{name:24}{whole / GIB:8.2f} GiB{share}")
    if degree > 1:
        other = sum(part.of_rank(degree, first=False) for part in found.parts)
        lines.append(f"{'every other rank':24}{other / GIB:8.2f} GiB")
    lines.append(
        f"{'KV of a token':24}{kv / KIB:8.2f} KiB, of it the drafter's {found.draft_token_bytes / KIB:.2f} KiB"
    )
    lines.append(f"{longest} tokens of context: {pages} pages of {page_size}, {pages * page_size * kv / GIB:.2f} GiB")
    heads = "no heads" if found.drafter == "ngram" else f"its heads: {found.drafter}"
    lines.append(f"drafter default: {'ngram' if found.drafter == 'ngram' else 'auto'} ({heads})")
    return lines
