"""``paceline serve --dry-run``: where nodes would be, for the options and hosts of deploy/."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from typer.testing import CliRunner

from cluster.commands.cli import app
from cluster.nodes.host_file import read_hosts
from cluster.role_check import check_roles
from cluster.state.wanted import WantedNode
from cluster.supervision import _Places
from paceline.config import ServeConfig
from paceline.errors import ConfigError, InvalidRequest
from paceline.role_options import RoleOptions
from tests.multihost.small_model import write_model

if TYPE_CHECKING:
    from cluster.nodes.bundles import Wanted
    from cluster.nodes.launch import RayNodes

ROOT = Path(__file__).parents[3]
INDEXES = ROOT / "tests/models/indexes"


def shown(*options: str) -> list[list[str]]:
    """The words of each line that the dry run prints."""
    done = CliRunner().invoke(app, ["serve", "--dry-run", *options], catch_exceptions=False)
    return [line.split() for line in done.stdout.splitlines()]


def of_deploy(options: str, hosts: str, model: str) -> list[list[str]]:
    files = ("--config", str(ROOT / "deploy" / options), "--hosts", str(ROOT / "deploy" / hosts))
    return shown(*files, "--model", str(INDEXES / model))


@pytest.mark.parametrize(
    ("options", "hosts", "model", "placed"),
    [
        (
            "one-host-4+4.yaml",
            "hosts-one.yaml",
            "llama-3.1-70b.json",
            ["127.0.0.1 0 decode-0 4 32.86 20.00", "127.0.0.1 1 prefill-0 4 32.86 20.00"],
        ),
        (
            "one-host-6+2.yaml",
            "hosts-one.yaml",
            "llama-3.1-8b.json",
            ["127.0.0.1 0 decode-0 2 7.48 32.00", *(f"127.0.0.1 {n + 1} prefill-{n} 2 7.48 16.00" for n in range(3))],
        ),
        (
            "several-hosts.yaml",
            "hosts-several.yaml",
            "llama-3.1-70b.json",
            [
                "10.77.0.2 0 prefill-0 4 32.86 20.00",
                "10.77.0.2 1 prefill-1 4 32.86 20.00",
                "10.77.0.3 0 decode-0 8 16.43 40.00",
                "10.77.0.4 0 decode-1 8 16.43 40.00",
            ],
        ),
    ],
)
def test_the_options_of_deploy_fit_their_hosts(options: str, hosts: str, model: str, placed: list[str]) -> None:
    """Mutants: ranks of a node on two hosts; bytes of the whole model for each rank; the KV of the other role."""
    _, *rows = of_deploy(options, hosts, model)
    assert not any("fit:" in row for row in rows)
    cells = [(*row[:3], row[4], row[7], row[9]) for row in rows]
    assert [" ".join(cell) for cell in cells] == placed


def test_what_does_not_fit_is_told_with_the_numbers(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    files = ("--hosts", str(hosts), "--config", str(ROOT / "deploy/one-host-4+4.yaml"))
    hosts.write_text("h: {gpus: 8, gpu_memory_gib: 40}")
    last = " ".join(shown(*files, "--model", str(INDEXES / "llama-3.1-70b.json"))[-1])
    assert last == "prefill-0 does not fit: rank 0 needs 52.86 GiB, a GPU of h has 40.00"
    hosts.write_text("h: {gpus: 4}\ni: {gpus: 4}")
    assert {row[0] for row in shown(*files)[2:]} == {"h", "i"}
    hosts.write_text("h: {gpus: 5}\ni: {gpus: 3}")
    with pytest.raises(ConfigError, match=r"prefill-0 needs 4 GPU on one host beside 1 other nodes: h has .*; i has"):
        shown(*files)
    hosts.write_text("h: {gpus: 8}\ni: {gpus: 6}")
    three = [row[0] for row in shown(*files, "--prefill-tp", "6", "--decode-nodes", "2")[2:]]  # 6 + 4 + 4
    assert sorted(three) == ["h", "h", "i"]
    for text, told in (
        ("h: {gpu: 4}", r"h\.gpu: Extra"),
        ("- h", "valid dictionary"),
        ("{}", "0 hosts"),
        ("h: [", "h: "),
    ):
        hosts.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_hosts(hosts)
    with pytest.raises(ConfigError, match="is for --dry-run"):
        CliRunner().invoke(app, ["serve", "--hosts", str(hosts)], catch_exceptions=False)


def test_nodes_that_fit_alone_and_not_together_are_told(tmp_path: Path) -> None:
    """Mutants: each is compared with all memory of its host; weights that nodes have together count for each."""
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("h: {cpus: 8, memory_gib: 28, gpus: 1, gpu_memory_gib: 28}")
    options = ["--hosts", str(hosts), "--model", str(INDEXES / "llama-3.1-8b.json"), "--kv-cache-tokens", "32768"]
    assert not any("fit" in row for row in shown(*options))
    told = " ".join(shown(*options, "--decode-nodes", "3")[-1])
    assert told == "the nodes on cpu of h do not fit beside each other: they need 30.96 GiB, it has 28.00"
    told = " ".join(shown(*options, "--device", "cuda:0")[-1])
    assert told.startswith("the nodes on cuda:0 of h do not fit beside each other")


@pytest.mark.parametrize(
    "options",
    [
        {"prefill": RoleOptions(dtype="fp32")},
        {"decode": RoleOptions(device="cuda")},
        {"prefill": RoleOptions(tp=3)},
        {"prefill": RoleOptions(kv_cache_tokens=1024)},
    ],
)
def test_no_prefill_node_comes_that_could_not_serve(tmp_path: Path, options: dict[str, RoleOptions]) -> None:
    """The deployment starts without one, and operators add or switch one. Mutant: options are compared at the start
    alone, where there is nothing to compare."""
    common = {"model": str(write_model(tmp_path)), "kv_cache_tokens": 8192, "prefill_nodes": 0}
    added: list[Wanted] = []
    nodes = cast("RayNodes", SimpleNamespace(add=added.append, check_fits=added.append))
    wrong = _Places(nodes, ServeConfig.model_validate(common | options))
    for change in (wrong.add, wrong.check_fits):
        change(WantedNode("decode-1", "decode"))
        with pytest.raises(InvalidRequest, match="allow no prefill node"):
            change(WantedNode("decode-1", "prefill"))
    _Places(nodes, ServeConfig.model_validate(common)).add(WantedNode("prefill-0", "prefill"))
    assert len(added) == 3


def test_ranks_and_memory_that_a_model_cannot_have_are_told_before_anything_starts(tmp_path: Path) -> None:
    """Mutants: the roles are not looked at; prefill nodes refuse what decode nodes take."""
    common = {"model": str(write_model(tmp_path)), "kv_cache_tokens": 8192}
    for options, key, told in (
        (
            {"decode": RoleOptions(tp=3)},
            "decode_tp",
            "3 ranks do not fit a model of 4 heads, 2 KV heads, 4 slabs and sums",
        ),
        ({"tp": 3}, "tp", "3 ranks do not fit"),
        ({"prefill": RoleOptions(kv_cache_tokens=1024)}, "prefill_kv_cache_tokens", "hold 1024 tokens and .* 8192"),
    ):
        with pytest.raises(ConfigError, match=told) as wrong:
            check_roles(ServeConfig.model_validate(common | options))
        assert wrong.value.key == key
    check_roles(ServeConfig.model_validate(common | {"prefill": RoleOptions(kv_cache_tokens=4100)}))
