"""Nodes of two ranks, each a process with a GPU of its own. Most bodies run on CPUs, too, where gloo carries the parts.

The order of sums shows at four ranks and more, in tests/ranks/test_same_bits.py.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from kv_transfer.transports.loopback import loopback_pair
from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.errors import NodeUnavailable
from tests.support.device_runner import answers, texts
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.ranked_model import write_ranked_model
from tests.support.tiny_model import tiny_request
from tests.support.two_engines import Decode, Prefill, apart

TWO_GPUS = (
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
)
DEVICES = ("cpu", pytest.param("cuda", marks=TWO_GPUS))
SOON_S = 10.0  # for a rank that is lost; one that is silent would be given 30 s
REQUESTS = [tiny_request(index=i, max_tokens=10, temperature=float(i % 2)) for i in range(4)]
pytestmark = [needs_kernels, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ranked_model(tmp_path_factory.mktemp("ranks") / "model")


@contextmanager
def node(device: str, model: Path, tp: int, **options: object) -> Iterator[ModelRunner]:
    """A node's runner; none of its processes is left."""
    before = set(followers())
    asked = {"dtype": "fp32", "drafter": "none", "kv_cache_tokens": 2048, "max_model_len": 256, "threads": 1}
    asked |= {"model": str(model), "device": device, "tp": tp, "rank_sums": "collective"}
    runner = build_runner(NodeConfig.model_validate(asked | options))
    try:
        yield runner
    finally:
        runner.close()
        assert set(followers()) == before


def followers() -> list[psutil.Process]:
    """Those of this process that live."""
    return [child for child in psutil.Process().children() if "paceline.ranks.process" in " ".join(child.cmdline())]


def run_until(runner: ModelRunner, end: float) -> None:
    """Steps, until one fails or time is over."""
    while time.monotonic() < end:
        run(runner, REQUESTS[:1])


@pytest.mark.parametrize("bits", ["fast", "exact"])
@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_give_the_tokens_of_one(
    device: str, bits: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bits are promised, those of the logits too. Mutant: the folder where ranks meet is left behind."""
    if device == "cpu" and bits == "exact":
        pytest.skip("a CPU's bits are exact")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tell = partial(run, requests=REQUESTS, batch=3, chunk_tokens=7)
    with node(device, model, 1, bits=bits, dtype="bf16" if bits == "exact" else "fp32") as one:
        expected = tell(one)
    with node(device, model, 2, bits=bits, dtype="bf16" if bits == "exact" else "fp32") as two:
        assert list(tmp_path.iterdir()) == []
        seen = tell(two)
        assert two.identity == one.identity  # no fingerprint names the degree
    if device == "cpu" or bits == "exact":
        assert seen == expected
    assert [outcome.token_ids for outcome in seen] == [outcome.token_ids for outcome in expected]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (2, 2)])
def test_apart(device: str, prefill_tp: int, decode_tp: int, model: Path) -> None:
    if device == "cpu" and decode_tp == 2:
        pytest.skip("tests/ranks/test_apart.py has other degrees on CPUs")
    place = torch.device("cuda:0" if device == "cuda" else device)
    with node(device, model, 1) as alone:
        expected = texts(answers(alone, REQUESTS))
    with node(device, model, prefill_tp) as first, node(device, model, decode_tp, page_size=8) as second:
        decode, ends = Decode(second), loopback_pair()
        receiver = decode.attach(ends[1], lambda ack: prefill.sender.acknowledge(ack), "loopback", place)
        prefill = Prefill(first, ends[0], receiver.feed, place)
        try:
            assert apart(prefill, decode, REQUESTS) == expected
            assert decode.landed == prefill.sent
        finally:
            prefill.close()
            decode.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_ends_the_node(device: str, sent: signal.Signals, model: Path) -> None:
    """In the midst of steps. Nothing is left, and on the same devices the next generation serves. Mutants: nobody looks
    whether a rank is stopped; a collective is not ended from outside."""
    if device == "cpu" and sent is signal.SIGKILL:
        pytest.skip("tests/e2e/test_ranks.py kills ranks on CPUs")
    with node(device, model, 2) as lost:
        expected = run(lost, REQUESTS[:1])
        (follower,) = followers()
        follower.send_signal(sent)
        began = time.monotonic()
        with pytest.raises(NodeUnavailable, match="ranks of this node are lost"):
            run_until(lost, began + SOON_S)
        assert time.monotonic() - began < SOON_S
        assert not lost.alive()
        follower.kill()  # the end would wait for one that is stopped
    if sent is signal.SIGKILL:
        with node(device, model, 2) as again:
            assert run(again, REQUESTS[:1]) == expected
