"""The sampler on the logits' own device: tokens that never wait for the host. ``sampler`` is the truth on the CPU.

Same logits, same tokens: integers of the noise are equal bit for bit, cuts and ties follow the same rules, scores are
float64 (see ``kernels_triton``). Parameters travel to the device in one copy; results stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from paceline.layers.upload import staged, staged_together
from paceline.request import SamplingParams
from paceline.sampling.noise import row_keys
from paceline.sampling.packing import DeviceRows, upload_rows
from paceline.sampling.sampler import RowContext
from paceline.triton_support import on_device_of, runs_triton

BROKEN = -1  # in place of the token of a row whose best logit is not finite


class _Operations(Protocol):
    """What ``kernels_triton`` and ``device_torch`` both offer."""

    def noise(self, ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor: ...
    def adjust(self, logits: torch.Tensor, rows: DeviceRows) -> torch.Tensor: ...
    def sample(self, logits: torch.Tensor, rows: DeviceRows) -> torch.Tensor: ...
    def topk(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        temperatures: torch.Tensor,
        width: int,
        token_map: torch.Tensor | None,
        raced: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def operations(device: torch.device) -> _Operations:
    """The kernels for a device."""
    if runs_triton(device):
        from paceline.sampling import kernels_triton

        return kernels_triton
    from paceline.sampling import device_torch

    return device_torch


def sample_rows_device(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    """``sampler.sample_rows`` without waiting for the device. logits: float32 [R, V], left as it is.

    Returns int64 [R] on the logits' device. Where ``sample_rows`` raises because a row's best logit is not finite,
    that row's token is BROKEN: whoever reads the tokens must refuse it. Raises ValueError when a row that samples has
    no seed.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} contexts")
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    ops = operations(logits.device)
    with on_device_of(logits):
        packed = upload_rows(rows, logits.shape[1], logits.device)
        logits = ops.adjust(logits, packed) if packed.has_edits else logits.contiguous()
        return ops.sample(logits, packed)


def warm_sampling(device: torch.device, vocab_size: int) -> None:
    """Launch every kernel of ``sample_rows_device``: a row with penalties, a bias, top-k and top-p meets all of them.
    Nothing where no kernel has to be compiled."""
    if not runs_triton(device):
        return
    params = SamplingParams(
        top_k=20, top_p=0.9, min_p=0.01, presence_penalty=0.1, repetition_penalty=1.1, logit_bias={0: 1.0}, seed=0
    )
    sample_rows_device(torch.zeros(1, vocab_size, device=device), [RowContext(params, 2, (0,), (1,), ())])


def race_topk(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperatures: torch.Tensor,
    width: int,
    token_map: torch.Tensor | None = None,
    *,
    coupled: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sampler.perturbed_topk`` with everything on one device already, so that a draft loop (or a captured graph) can
    call it step by step.

    logits: float32 [R, W]. keys: int32 [R, 2], the words of ``noise.row_key`` for each row's (seed, absolute position
    of the proposed token), see ``upload_keys``. temperatures: float64 or float32 [R]; 0 ranks by logits and reports q
    at temperature 1. token_map: int64 or int32 [W], draft id to target id. coupled False: rank by logits everywhere.
    Returns (target ids int64 [R, width], their q float32 [R, width]), best first, ties by the lowest column.
    """
    if not 1 <= width <= logits.shape[1]:
        raise ValueError(f"width must be between 1 and {logits.shape[1]}, got {width}")
    if keys.dtype != torch.int32 or keys.shape != (logits.shape[0], 2):
        raise ValueError(f"keys must be int32 [{logits.shape[0]}, 2], got {keys.dtype} {list(keys.shape)}")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    with on_device_of(logits):
        return operations(logits.device).topk(logits, keys, temperatures, width, token_map, coupled)


def upload_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> torch.Tensor:
    """Noise keys of R rows: int32 [R, 2] on the device. seeds: unsigned 64-bit; positions: unsigned 32-bit."""
    return staged(row_keys(seeds, positions).view(np.int32), device)


def draft_topk(
    draft_logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    width: int,
    *,
    coupled: bool = True,
    token_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sampler.perturbed_topk`` on the logits' device, without waiting for it. Same arguments, same result."""
    if not len(params) == len(positions) == draft_logits.shape[0]:
        raise ValueError("draft_logits, params and positions differ in their number of rows")
    if any(coupled and p.temperature > 0.0 and p.seed is None for p in params):
        raise ValueError("a request that samples needs a seed by the time it reaches the sampler")
    temperatures = [p.temperature for p in params]
    keys, there = upload_races([p.seed or 0 for p in params], positions, temperatures, draft_logits.device)
    return race_topk(draft_logits, keys, there, width, token_map, coupled=coupled)


def upload_races(
    seeds: Sequence[int], positions: Sequence[int], temperatures: Sequence[float], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise keys of R rows, int32 [R, 2], and temperatures, float64 [as many as there are], on the device by one copy.
    Where all are greedy nothing reads the keys, which are 0 then."""
    none = np.zeros((len(seeds), 2), dtype=np.int32)
    keys = row_keys(seeds, positions).view(np.int32) if any(temperatures) else none
    numbers = np.array(temperatures, dtype=np.float64).view(np.int32)
    there, words = staged_together((numbers, keys.reshape(-1)), device)
    return words.view(-1, 2), there.view(torch.float64)
