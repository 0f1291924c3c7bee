"""Random rows with every sampling parameter, and the checks of the device sampler, for any device."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch

from paceline.request import SamplingParams
from paceline.sampling.device import BROKEN, draft_topk, operations, race_topk, sample_rows_device, upload_keys
from paceline.sampling.noise import noise_bits_reference
from paceline.sampling.packing import CUT_ID, CUT_KEY, upload_rows
from paceline.sampling.params import process
from paceline.sampling.sampler import RowContext, perturbed_topk, sample_rows


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Any mixture of parameters, the extremes among them."""
    options: dict[str, Any] = {
        "seed": rng.getrandbits(64),
        "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.7, 1e-6, 100.0]),
    }
    mixed: dict[str, list[Any]] = {
        "top_k": [1, 2, 3, 5, 40, vocab_size - 1, vocab_size, vocab_size + 5],
        "top_p": [1e-10, 0.1, 0.5, 0.8, 0.95, 0.999, 1 - 1e-12],
        "min_p": [0.01, 0.1, 0.5, 1.0],
        "repetition_penalty": [0.7, 1.3, 2.0],
        "frequency_penalty": [-1.3, 0.3, 1.7],
        "presence_penalty": [-1.3, 0.3, 1.7],
    }
    options |= {name: rng.choice(values) for name, values in mixed.items() if rng.random() < 0.35}
    if rng.random() < 0.3:
        options["logit_bias"] = {
            rng.randrange(vocab_size): rng.choice([-math.inf, -100.0, 2.5, 0.1, 7.0]) for _ in range(3)
        }
    if rng.random() < 0.3:
        options["min_tokens"] = 7
        options["stop_token_ids"] = tuple({rng.randrange(vocab_size) for _ in range(2)})
    if rng.random() < 0.3 and vocab_size > 5:  # of tokens that rows are likely to have, so that sequences begin
        options["bad_token_ids"] = tuple(
            tuple(rng.randrange(min(vocab_size, 40)) for _ in range(rng.choice([1, 1, 2, 3]))) for _ in range(4)
        )
    return SamplingParams(**options)


def random_rows(rng: random.Random, count: int, vocab_size: int) -> list[RowContext]:
    """Some rows share a request and a history, as the nodes of a tree do."""

    def tokens(most: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randrange(most + 1))]

    rows: list[RowContext] = []
    while len(rows) < count:
        shared = (random_params(rng, vocab_size), rng.randrange(2**32 - 8), tuple(tokens(20)), tokens(10))
        for depth in range(min(rng.choice([1, 1, 3]), count - len(rows))):
            params, position, prompt, output = shared
            rows.append(RowContext(params, position + depth, prompt, output, tuple(tokens(4))))
    return rows


def random_logits(rng: random.Random, count: int, vocab_size: int) -> torch.Tensor:
    """Float32 [count, vocab_size]; flat and peaked rows, every third one with many ties, some with -inf."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = torch.randn(count, vocab_size, generator=generator)
    logits *= torch.tensor([[rng.choice([0.5, 2.0, 5.0])] for _ in range(count)])
    logits[::3] = (2 * logits[::3]).round() / 2  # both zeros among them
    logits[::7, : vocab_size // 3] = -math.inf
    return logits


def check_noise(device: torch.device) -> None:
    """The integers, bit for bit."""
    rng = random.Random(3)
    ids = [0, 1, 49151, 2**31 - 1, *(rng.getrandbits(31) for _ in range(30))]
    for _ in range(8):
        seed, position = rng.getrandbits(64), rng.getrandbits(32)
        keys = upload_keys([seed], [position], device)[0]
        bits = operations(device).noise(torch.tensor(ids, dtype=torch.int32, device=device), keys)
        assert bits.tolist() == [noise_bits_reference(seed, position, token) for token in ids]


def check_tokens(device: torch.device, vocab_size: int, count: int, seed: int) -> None:
    """``sample_rows`` on the CPU is the truth."""
    rng = random.Random(seed)
    rows, logits = random_rows(rng, count, vocab_size), random_logits(rng, count, vocab_size)
    if vocab_size == 5:  # biases and minimum lengths may leave nothing
        usable = [i for i in range(count) if _has_token(logits[i : i + 1], rows[i])]
        rows, logits = [rows[i] for i in usable], logits[usable]
    there = logits.to(device)
    tokens = sample_rows_device(there, rows)
    assert tokens.dtype == torch.int64
    assert tokens.device == there.device
    expected = sample_rows(logits, rows)
    wrong = [(rows[i], expected[i], token) for i, token in enumerate(tokens.tolist()) if token != expected[i]]
    assert not wrong, (len(wrong), wrong[:2])
    assert torch.equal(there.cpu(), logits)


def _has_token(logits: torch.Tensor, row: RowContext) -> bool:
    try:
        sample_rows(logits, [row])
    except FloatingPointError:
        return False
    return True


def _one(params: dict[str, Any], position: int = 0) -> RowContext:
    return RowContext(SamplingParams(**{"seed": 5, **params}), position, (), [], ())


def check_cuts(device: torch.device, vocab_size: int, count: int) -> None:
    """The very sets that ``params.process`` leaves, not only the tokens drawn from them."""
    from paceline.sampling.triton_cut import cut

    rng = random.Random(vocab_size)
    rows = []
    for _ in range(count):
        top_k = rng.choice([0, 1, 2, 7, 30, vocab_size - 1])
        top_p = rng.choice([1.0, 1e-10, 0.2, 0.6, 0.9, 0.99] if top_k else [1e-10, 0.2, 0.6, 0.9, 0.99])
        rows.append(_one({"temperature": rng.choice([0.3, 1.0, 3.0]), "top_k": top_k, "top_p": top_p}))
    logits = random_logits(rng, count, vocab_size)
    packed = upload_rows(rows, vocab_size, device)
    assert packed.cut_rows.tolist() == list(range(count))
    cut(logits.to(device), packed, logits.amax(dim=1, keepdim=True).to(device))
    words = packed.words.cpu()
    key, last = words[:, CUT_KEY : CUT_KEY + 1], words[:, CUT_ID : CUT_ID + 1]
    bits = torch.where(logits == 0.0, 0.0, logits).view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    kept = (keys > key) | ((keys == key) & (torch.arange(vocab_size) <= last))
    for row, values, found in zip(rows, logits, kept, strict=True):
        expected = process(values, row.params).exp() > 0.0
        assert torch.equal(found & (values > -math.inf), expected & (values > -math.inf)), row.params


def check_ties(device: torch.device, count: int = 40) -> None:
    """Among equal logits the lowest ids stay, whatever cuts, in whichever chunk they lie; in particular top-k 1 and a
    tiny top-p leave one."""
    vocab_size = 2200
    logits = torch.zeros(5, vocab_size)
    logits[2:, [17, 2100, 2199]] = 1.0
    logits[3] *= -1
    zeros = torch.zeros(vocab_size)
    zeros[0::2] = -0.0  # both zeros are one value
    zeros[6:] = -9.0
    greedy = [_one({"temperature": 0.0})] * 5
    assert sample_rows_device(logits.to(device), greedy).tolist() == [0, 0, 17, 0, 17]
    for cut in ({"top_k": 1}, {"top_p": 1e-12}, {"top_p": 1e-4}):
        assert sample_rows_device(logits.to(device), [_one(cut)] * 5).tolist() == [0, 0, 17, 0, 17]
    for cut in ({"top_k": 2}, {"top_k": 4}, {"top_p": 0.5}, {"top_k": 4, "top_p": 0.3}, {"min_p": 1.0}):
        rows = [_one(cut, position) for position in range(count)]
        for pattern in (logits[2], zeros):
            same = pattern.expand(count, -1).contiguous()
            tokens = sample_rows_device(same.to(device), rows).tolist()
            assert tokens == sample_rows(same, rows)
            assert len(set(tokens)) > 1


def check_masses_at_their_limit(device: torch.device) -> None:
    """Equal probabilities whose sums come to the limit but for rounding."""
    for count, top_p, stay in ((8, 0.5, 4), (10, 0.3, 3), (3, 1 / 3, 1), (1000, 0.7, 700)):
        logits = torch.full((200, 1200), -math.inf)
        logits[:, :count] = 0.25
        rows = [_one({"top_p": top_p, "temperature": 0.7}, position) for position in range(200)]
        tokens = sample_rows_device(logits.to(device), rows).tolist()
        assert tokens == sample_rows(logits, rows)
        assert max(tokens) < stay


def check_broken_rows(device: torch.device) -> None:
    """A best logit that is not finite gives BROKEN, and leaves its neighbours alone."""
    logits = torch.zeros(5, 3000)
    logits[0, 2500] = math.nan
    logits[1, 7] = math.inf
    logits[2] = -math.inf
    logits[3, 11] = 50.0
    logits[4, :2999] = -math.inf
    for params in ({"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}):
        tokens = sample_rows_device(logits.to(device), [_one(params)] * 5).tolist()
        assert tokens == [BROKEN, BROKEN, BROKEN, 11, 2999]
        found = race_topk(logits.to(device), upload_keys([1] * 5, [2] * 5, device), torch.ones(5, device=device), 3)
        assert 0 <= int(found[0].min()) <= int(found[0].max()) < 3000


def check_topk(device: torch.device, width: int, vocab_size: int, *, mapped: bool, coupled: bool, count: int) -> None:
    """``perturbed_topk`` on the CPU is the truth; greedy and sampled rows in one call."""
    rng = random.Random(width)
    logits = random_logits(rng, count, vocab_size)
    temperatures = [rng.choice([0.0, 0.6, 1.0, 2.0]) for _ in range(count)]
    params = [SamplingParams(temperature=t, seed=rng.getrandbits(64)) for t in temperatures]
    positions = [rng.randrange(2**32) for _ in range(count)]
    token_map = torch.randperm(3 * vocab_size)[:vocab_size] if mapped else None
    expected = perturbed_topk(logits, params, positions, width, coupled=coupled, token_map=token_map)
    there = None if token_map is None else token_map.to(device)
    found = draft_topk(logits.to(device), params, positions, width, coupled=coupled, token_map=there)
    assert torch.equal(found[0].cpu(), expected[0])
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=2e-5, atol=1e-7)


def quiet() -> Any:
    """The interpreter computes with numpy, which warns where a hopeless token's score overflows."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")
