"""Hosts in namespaces with the real cluster launcher over ssh: what crosses the cable, and what a lost host costs.

One deployment for all, in order: first what leaves it whole, then power losses.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.request import SamplingParams, SequenceRequest
from tests.multihost.clients import Stream, Streams
from tests.multihost.deployment import Deployment
from tests.multihost.hosts import Host, Lan
from tests.multihost.small_model import KV_BYTES_PER_TOKEN, SPEC

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(420)]
long = pytest.mark.long_run

ALL = {"prefill-0", "decode-0", "decode-1"}
NUM_STREAMS = 6
LONG = 1000  # tokens of a stream that outlives a failure
LOSS_PROMPT = 600  # too long for a decode node to compute it itself: every stream is handed over
LOSS_KV = LOSS_PROMPT * KV_BYTES_PER_TOKEN
BEGUN = 3  # tokens of every stream when it happens
PLACINGS = 5  # batches of streams until some run where the loss will be
LEASE_TTL_S = 2.0
RECONNECT_S = 5.0  # gRPC's: an attempt that runs into its timeout of 1 s, a pause of about 1 s, one that works; twice
SAMPLING = ("max_tokens", "temperature", "seed", "ignore_eos")


def make_requests(salt: int, prompt_tokens: int, max_tokens: int) -> list[dict[str, Any]]:
    """Generation options; no two prompts begin alike, so that no prefix is cached."""
    rng = random.Random(salt)
    return [
        {
            "prompt": [rng.randrange(3, SPEC.vocab_size) for _ in range(prompt_tokens)],
            "max_tokens": max_tokens,
            # Greedy text of so small a model goes round in circles, which drafts make short work of.
            "temperature": 1.0 if number % 3 or max_tokens == LONG else 0.0,
            "seed": 100 * salt + number,
            "ignore_eos": True,
        }
        for number in range(NUM_STREAMS)
    ]


Answers = Callable[[list[dict[str, Any]]], list[list[int]]]


@pytest.fixture(scope="session")
def expected(model_folder: Path) -> Answers:
    """The one-process engine's tokens of requests."""
    config = NodeConfig(model=str(model_folder), dtype="bf16", drafter="none", threads=1, kv_cache_tokens=32768)
    runner = build_runner(config)

    def answer(requests: list[dict[str, Any]]) -> list[list[int]]:
        sequences = [
            SequenceRequest(f"r{n}", tuple(request["prompt"]), SamplingParams(**{k: request[k] for k in SAMPLING}))
            for n, request in enumerate(requests)
        ]
        done = ColocatedEngine(runner, chunk_tokens=256, max_running=NUM_STREAMS).generate(sequences)
        return [list(sequence.token_ids) for sequence in done]

    return answer


def tokens_of(streams: list[Stream]) -> list[list[int]]:
    return [stream.tokens for stream in streams]


def served_by(streams: list[Stream], role: str) -> set[str]:
    return {stream.end[role] for stream in streams if stream.end is not None}


def decode_hosts(lan: Lan) -> list[Host]:
    return [lan.hosts["decode-1"], lan.hosts["decode-2"]]


def test_kv_crosses_the_cable_and_tokens_are_those_of_one_process(
    deployment: Deployment, lan: Lan, expected: Answers
) -> None:
    requests = make_requests(1, prompt_tokens=1500, max_tokens=40)
    hosts = [lan.hosts["prefill-1"], *decode_hosts(lan)]
    before = [host.traffic() for host in hosts]
    streams = deployment.stream(requests).results()
    after = [host.traffic() for host in hosts]
    assert tokens_of(streams) == expected(requests)
    assert served_by(streams, "prefill") == {"prefill-0"}
    assert served_by(streams, "decode") == {"decode-0", "decode-1"}

    kv = NUM_STREAMS * 1500 * KV_BYTES_PER_TOKEN
    assert sum(stream.end["target_kv"] for stream in streams if stream.end) == kv
    sent = after[0].sent - before[0].sent
    received = [b.received - a.received for a, b in zip(before[1:], after[1:], strict=True)]
    print(f"\nKV by the formula {kv}, sent by the prefill host {sent}, received by the decode hosts {received}")
    assert kv <= sent < 1.3 * kv + 2_000_000  # frames, and what Ray, Redis and gRPC say meanwhile
    assert kv <= sum(received)
    assert min(received) > kv / NUM_STREAMS


@pytest.mark.parametrize(
    ("shaped", "options"),
    [
        pytest.param("prefill-1", {"delay_ms": 20.0, "mbit_s": 50.0}, id="slow"),
        pytest.param("decode-1", {"delay_ms": 5.0, "loss": 0.02}, id="lossy", marks=long),
    ],
)
def test_a_bad_link_changes_no_token_and_fails_nothing(
    deployment: Deployment, lan: Lan, expected: Answers, shaped: str, options: dict[str, float]
) -> None:
    requests = make_requests(2 if shaped == "prefill-1" else 3, prompt_tokens=1000, max_tokens=60)
    retries = deployment.retries()
    with lan.slow(lan.hosts[shaped], **options):
        start = time.monotonic()
        streams = deployment.stream(requests).results()
        print(f"\n{options} at {shaped}: {time.monotonic() - start:.1f} s")
    assert tokens_of(streams) == expected(requests)
    assert served_by(streams, "prefill") == {"prefill-0"}
    assert served_by(streams, "decode") == {"decode-0", "decode-1"}
    assert deployment.retries() == retries
    assert set(deployment.watch.nodes) == ALL


@dataclass
class Loss:
    """Streams that ran when a host was lost, some of them there."""

    requests: list[dict[str, Any]]
    streams: list[Stream]
    moved: list[Stream]  # those of them that another node went on with
    silence_s: float  # the longest
    lost_at: float  # monotonic clock


def runs_there(deployment: Deployment, running: Streams, node: str) -> bool:
    """Whether a node says, from now on and while all streams run, that it runs some of them."""
    watch, now = deployment.watch, time.monotonic()
    while running.under_way == NUM_STREAMS:
        if watch.asked_at > now and node in watch.running:
            return watch.running[node] > 0
        time.sleep(0.005)
    return False


def lose(deployment: Deployment, salt: int, lost: str, host: Host) -> Loss:
    """Cut the cable of node ``lost``'s host while all streams run, some of them there. The cable stays out.

    A node is ahead of what its clients have read: one that counts a stream may be done with it a moment later, and the
    cut then hits nothing. Such a cut is undone, and other streams are placed.
    """
    for attempt in range(PLACINGS):
        requests = make_requests(100 * salt + attempt, prompt_tokens=LOSS_PROMPT, max_tokens=LONG)
        with deployment.stream(requests) as running:
            running.wait_for(BEGUN)
            if not runs_there(deployment, running, lost):
                print(f"\nnot all under way, or none on {lost}: {deployment.watch.running}")
                running.results()
                continue
            counts = [len(stream.tokens) for stream in running.streams]
            lost_at = time.monotonic()
            host.unplug()
            streams = running.results()
        # A stream that moves is handed over a second time.
        moved = [n for n, stream in enumerate(streams) if stream.end and stream.end["target_kv"] > LOSS_KV]
        silence_s = max(stream.silence_s(lost_at) for stream in streams)
        print(
            f"\n{NUM_STREAMS} streams of {LONG} tokens, of which they had {counts}, ended "
            f"{time.monotonic() - lost_at:.1f} s after the loss; moved: {moved}"
        )
        if moved:
            return Loss(requests, streams, [streams[n] for n in moved], silence_s, lost_at)
        host.plug()
        deployment.wait_for(ALL, 60.0)
        time.sleep(RECONNECT_S)
    raise AssertionError(f"{PLACINGS} times no stream ran on {lost} when it was lost")


def check_survived(loss: Loss, lost: str, expected: Answers) -> None:
    """Every stream is right, and those that moved ended on the other decode node: what the lost one had sent before is
    of use."""
    assert tokens_of(loss.streams) == expected(loss.requests)
    assert served_by(loss.moved, "decode") == ALL - {lost, "prefill-0"}
    assert loss.silence_s < 3 * LEASE_TTL_S


def check_both_decode(deployment: Deployment, expected: Answers, requests: list[dict[str, Any]]) -> None:
    """Both decode nodes serve."""
    streams = deployment.stream(requests).results()
    assert tokens_of(streams) == expected(requests)
    assert served_by(streams, "decode") == {"decode-0", "decode-1"}


def wait_for_hand_overs(deployment: Deployment) -> None:
    """Until every stream is handed over, and to both decode nodes: the first that meets a link of before a cut is
    computed by decode alone."""
    for attempt in range(PLACINGS):
        streams = deployment.stream(make_requests(20 + attempt, prompt_tokens=LOSS_PROMPT, max_tokens=8)).results()
        if (served_by(streams, "prefill"), served_by(streams, "decode")) == ({"prefill-0"}, {"decode-0", "decode-1"}):
            return
        print(f"\nnot handed over: {[stream.end for stream in streams]}")
        time.sleep(RECONNECT_S)
    raise AssertionError(f"{PLACINGS} times decode computed a prompt itself, or one node decoded all")


@pytest.mark.parametrize("hold_s", [pytest.param(0.0, id="short"), pytest.param(15.0, id="long", marks=long)])
def test_a_partition_moves_streams_and_its_end_brings_the_node_back(
    deployment: Deployment, lan: Lan, expected: Answers, hold_s: float
) -> None:
    """Short: until the streams have moved. Long: past the supervisor's grace, which must leave the node alone."""
    deployment.wait_for(ALL, 60.0)
    host = lan.hosts["decode-2"]
    lost = deployment.watch.on(host)
    address, already = deployment.watch.nodes[lost], deployment.log.stat().st_size
    try:
        loss = lose(deployment, 4 + bool(hold_s), lost, host)
        deployment.wait_for(ALL - {lost}, 3 * LEASE_TTL_S)
        time.sleep(max(0.0, loss.lost_at + hold_s - time.monotonic()))
    finally:
        host.plug()
    back_s = deployment.wait_for(ALL, 90.0)
    print(f"\npartition of {lost}: longest silence {loss.silence_s:.1f} s, back {back_s:.1f} s after the cable")
    check_survived(loss, lost, expected)
    time.sleep(RECONNECT_S)
    check_both_decode(deployment, expected, make_requests(6 + bool(hold_s), prompt_tokens=200, max_tokens=40))
    assert deployment.watch.nodes.get(lost) == address, f"it was started anew: {deployment.events_since(already, lost)}"
    assert deployment.events_since(already, lost) <= {"cut_off"}, "the supervisor gave it up"


@long
def test_power_loss_of_a_decode_host_and_its_return(deployment: Deployment, lan: Lan, expected: Answers) -> None:
    """The cable first, then the power: nobody hears a connection close. Once it is on again, Ray's launcher starts Ray
    there, and Paceline the node."""
    deployment.wait_for(ALL, 60.0)
    host = lan.hosts["decode-2"]
    lost = deployment.watch.on(host)
    loss = lose(deployment, 8, lost, host)
    host.power_off()
    check_survived(loss, lost, expected)
    host.power_on()
    back_s = deployment.wait_for(ALL, 150.0)
    print(f"\npower loss of {lost}: longest silence {loss.silence_s:.1f} s, back {back_s:.1f} s after its boot")
    check_both_decode(deployment, expected, make_requests(9, prompt_tokens=200, max_tokens=40))


def test_power_loss_of_the_prefill_host(deployment: Deployment, lan: Lan, expected: Answers) -> None:
    """Streams with their prompt computed go on. One that comes while its lease runs is sent there, in vain; decode
    computes its prompt, and those of all that come later."""
    deployment.wait_for(ALL, 60.0)
    wait_for_hand_overs(deployment)
    old = make_requests(10, prompt_tokens=LOSS_PROMPT, max_tokens=LONG)
    new = make_requests(11, prompt_tokens=500, max_tokens=40)
    with deployment.stream(old) as running:
        running.wait_for(BEGUN)
        lost_at = time.monotonic()
        lan.hosts["prefill-1"].power_off()
        came = deployment.stream(new).results()
        streams = running.results()
    first_s = max(stream.arrivals[0] for stream in came) - lost_at
    silence_s = max(stream.silence_s(lost_at) for stream in streams)
    deployment.wait_for(ALL - {"prefill-0"}, 3 * LEASE_TTL_S)
    later_at = time.monotonic()
    later = deployment.stream(new).results()
    later_s = max(stream.arrivals[0] for stream in later) - later_at
    print(
        f"\npower loss of prefill: longest silence of running streams {silence_s:.1f} s; first tokens of those that "
        f"came at once {first_s:.1f} s after the loss, later {later_s:.1f} s after they came"
    )
    assert tokens_of(streams) == expected(old)
    assert tokens_of(came) == tokens_of(later) == expected(new)
    # A stream that is begun anew has its prompt computed by its decode node. The prefill node may be lost before it
    # tells what it handed over.
    ends = [stream.end for stream in streams if stream.end]
    assert [end["prefill"] for end in ends] == ["prefill-0"] * NUM_STREAMS
    assert {end["target_kv"] for end in ends} <= {0, LOSS_KV}
    assert silence_s < 3 * LEASE_TTL_S
    assert first_s < 3 * LEASE_TTL_S + 2.0
    assert served_by(came, "prefill") <= {"decode-0", "decode-1"}
    assert served_by(later, "prefill") <= {"decode-0", "decode-1"}
