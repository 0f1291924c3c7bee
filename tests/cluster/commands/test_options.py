"""Options of a deployment: where they come from, and what ``--help`` says of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cluster.commands.cli import app, with_serve_options
from cluster.commands.options import load_config, serve_options
from cluster.deployment import published_of
from cluster.joined import _joined_config, _whole_config
from cluster.option_sets import NODE_OPTIONS, SHARED_OPTIONS
from cluster.state.published import Served
from paceline.config import NodeConfig, ServeConfig
from paceline.engine_config import EngineConfig
from paceline.errors import ConfigError
from paceline.role_options import ROLES, RoleOptions

SERVED = Served(1, 1, True)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "options.yaml"
        path.write_text(text)
        return path

    return write


def test_the_command_line_overrides_the_environment_and_that_the_file(file: Callable[[str], Path]) -> None:
    found = load_config(
        {"max_running": 3, "max_waiting": None},
        file("max-running: 1\nmax_waiting: 1\nmax_queued: 1\nadaptive: off\n"),
        {"PACELINE_MAX_RUNNING": "2", "PACELINE_MAX_WAITING": "2", "PACELINE_HOME": "/x", "OTHER": "1"},
    )
    assert (found.max_running, found.max_waiting, found.max_queued, found.adaptive) == (3, 2, 1, "off")


def test_wrong_options_are_named_with_their_place(file: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"unknown option in environment") as unknown:
        load_config({}, None, {"PACELINE_MAX_RUNING": "2"})
    assert unknown.value.key == "PACELINE_MAX_RUNING"  # as whoever set it knows it
    with pytest.raises(ConfigError, match=r"options\.yaml: 0\)") as wrong:
        load_config({}, file("max_running: 0"), {})
    assert wrong.value.key == "max_running"


def test_a_router_joins_decode_nodes_of_a_kind_of_their_own() -> None:
    """Without prefill nodes their device may be any. Mutant: it is compared with that of prefill nodes, of which there
    is one by default."""
    own = ServeConfig(prefill_nodes=0, decode=RoleOptions(device="cuda"))
    joined = _joined_config(ServeConfig(), "redis://127.0.0.1:1/0", published_of(own, SERVED, [], ""))
    assert joined.of_role("decode").device == "cuda"


def test_a_router_of_another_build_joins_where_it_knows_what_is_chosen() -> None:
    """Mutants: a router of another version never joins; an option that it lacks is left out although it was chosen;
    what routers keep together is not looked at."""
    url, own = "redis://127.0.0.1:1/0", ServeConfig(max_queued=7, decode=RoleOptions(page_size=8))
    told = replace(published_of(own, SERVED, [], ""), build="0.2.0")
    later = replace(told, options=told.options | {"later": 1})
    for one in (told, later):
        joined = _joined_config(ServeConfig(), url, one)
        assert (joined.max_queued, joined.of_role("decode").node(1).page_size) == (7, 8)
        assert _whole_config(ServeConfig(), url, one).max_queued == 7
    roles = told.options | {"decode": {"page_size": 8, "later": 1}}
    for wrong, why in (
        (replace(later, chosen=[*later.chosen, "later"]), r"no option 'later'.*runs Paceline 0\.2\.0, this is"),
        (replace(told, options=roles), "no option 'decode_later'"),
        (replace(told, state=told.state + 1), r"runs Paceline 0\.2\.0, this is .* different things in Redis"),
    ):
        with pytest.raises(ConfigError, match=why):
            _joined_config(ServeConfig(), url, wrong)


def test_a_router_without_keys_does_not_join_a_deployment_that_has_them() -> None:
    """Its callers would be whoever they say. Mutant: it joins, since keys are an option of each router."""
    told = published_of(ServeConfig(api_keys="keys.yaml"), SERVED, [], "")
    with pytest.raises(ConfigError, match="are asked for by the deployment") as wrong:
        _joined_config(ServeConfig(), "redis://127.0.0.1:1/0", told)
    assert wrong.value.key == "api_keys"
    assert _joined_config(ServeConfig(api_keys="mine.yaml"), "redis://127.0.0.1:1/0", told).api_keys == "mine.yaml"


@pytest.mark.parametrize(
    ("text", "key", "told"),
    [
        ("decode: {tp: 2}\ndecode: {page_size: 8}", "config", "'decode' is there twice"),
        ("decode: {tp: 2, tp: 4}", "config", "'tp' is there twice"),
        ("decode: {tp: 2}\ndecode_tp: 4", "decode_tp", r"options\.yaml twice"),
        ("max-running: 2\nmax_running: 4", "max_running", r"options\.yaml twice"),
        ("decode: {device: gpu}\nprefill_nodes: 0", "decode_device", "match pattern"),
    ],
)
def test_an_option_that_is_there_twice_or_no_device_is_refused(
    file: Callable[[str], Path], text: str, key: str, told: str
) -> None:
    """Mutant: of two sections of a role the first is dropped without a word."""
    with pytest.raises(ConfigError, match=told) as wrong:
        load_config({}, file(text), {})
    assert wrong.value.key == key


def test_a_role_has_options_of_its_own_over_the_common_ones(file: Callable[[str], Path]) -> None:
    """Mutants: a layer replaces the whole section of the one below it; a role's options reach the other role; 0 ranks
    are kept."""
    found = load_config(
        {"prefill_tp": 4, "decode_tp": None, "prefill_cuda_graphs": False},
        file("tp: 2\npage_size: 32\nprefill: {tp: 8, prefill-chunk-tokens: 512}\ndecode: {page_size: 8, tp: 0}\n"),
        {"PACELINE_DECODE_MAX_RUNNING": "7"},
    )
    nodes = [found.of_role(role).node(1) for role in ROLES]
    assert [node.tp for node in nodes] == [4, 2]
    assert [(node.page_size, node.prefill_chunk_tokens) for node in nodes] == [(32, 512), (8, 256)]
    assert [(node.cuda_graphs, node.max_running) for node in nodes] == [(False, 32), (True, 7)]
    again = ServeConfig.model_validate(found.model_dump(mode="json"))  # as routers that join read it
    assert [again.of_role(role).node(1) for role in ROLES] == nodes
    assert {*ROLES} <= SHARED_OPTIONS & NODE_OPTIONS


def test_a_gpu_takes_longer_chunks(file: Callable[[str], Path]) -> None:
    """Where nothing else is said. Mutant: a node is sent 0, which one of an older build does not know."""
    found = load_config({}, file("device: cuda:1\ndecode: {prefill_chunk_tokens: 300}\n"), {})
    assert [found.of_role(role).node(1).prefill_chunk_tokens for role in ROLES] == [2048, 300]
    assert found.chunk_tokens == 2048


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        (
            "prefill: {page_szie: 8}",
            "prefill_page_szie",
            r"unknown option 'page_szie' in section prefill of .*yaml",
        ),
        ("decode: {nodes: 2}", "decode_nodes", "unknown option 'nodes' .* decode_nodes is an option of its own"),
        ("decode: {page_size: 0}", "decode_page_size", r"greater than or equal to 1 \(from .*yaml: 0\)"),
        ("decode: 2", "decode", r"must be a section, such as decode: \{tp: 2\}"),
        (
            "prefill: {dtype: fp32}",
            "config",
            "dtype is fp32 for prefill nodes and bf16 for decode nodes: handoff",
        ),
        ("decode: {dtype: fp32}\nhandoff_dtype_cast: true", "config", "is bf16 for prefill nodes and fp32 for decode"),
        ("decode: {device: cuda}", "config", "device is cpu for prefill nodes and cuda for decode nodes: text would"),
        ("device: cuda\ndecode: {attention: torch}", "config", "attention is auto for prefill nodes and torch for dec"),
    ],
)
def test_options_of_a_role_that_are_wrong(file: Callable[[str], Path], text: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as wrong:
        load_config({}, file(text), {})
    assert wrong.value.key == key


def test_options_of_roles_that_may_differ(file: Callable[[str], Path]) -> None:
    """Mutant: whatever differs is refused."""
    text = "handoff_dtype_cast: true\nprefill: {dtype: fp32, attention: torch}\ndevice: cpu"
    assert load_config({}, file(text), {}).of_role("prefill").dtype == "fp32"
    load_config({}, file("device: cuda:0\ndecode: {device: cuda:1}"), {})
    load_config({}, file("prefill_nodes: 0\ndecode: {device: cuda}"), {})


@pytest.mark.parametrize("config", [EngineConfig, NodeConfig, ServeConfig])
def test_every_option_has_a_description(config: type[EngineConfig]) -> None:
    for name, info in config.model_fields.items():
        text = " ".join((info.description or "").split())
        assert 15 < len(text) <= 200, name
        assert text.endswith("."), name


def test_options_of_a_group_stand_together() -> None:
    groups = [group for group, _ in groupby(serve_options(), key=lambda option: option.group)]
    assert len(groups) == len(set(groups))
    assert "" not in groups


@pytest.mark.parametrize("command", ["serve", "demo"])
@pytest.mark.parametrize("columns", [80, 120])
def test_help_shows_every_option_in_its_group(command: str, columns: int) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": str(columns)})
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    at = lines.index("Model")
    shown = " ".join(" ".join(lines[at:]).split())  # without line breaks
    for option in serve_options():
        start = shown.index(f"{option.flag} ")
        assert option.flag in " ".join(lines).split(), f"{option.flag} is cut"
        facts = f"default {option.default} {option.description} ({option.variable})"
        assert shown[start:].partition(facts)[0].startswith(option.flag), option.name
        assert f" {option.values}" in shown[start : shown.index(facts)], option.name
    titles = [group for group, _ in groupby(serve_options(), key=lambda option: option.group)]
    assert [line for line in lines[at:] if line in titles] == titles


@pytest.mark.parametrize(
    ("given", "level"),
    [([], "warning"), (["--verbose"], "info"), (["--verbose", "--log-level", "debug"], "debug")],
)
def test_verbose_is_short_for_a_log_level(given: list[str], level: str) -> None:
    seen: list[ServeConfig] = []
    made = typer.Typer()
    made.command()(with_serve_options(seen.append))
    done = CliRunner().invoke(made, given, catch_exceptions=False)
    assert done.exit_code == 0
    assert [config.log_level for config in seen] == [level]
    assert seen[0].node(1).log_level == level


def test_origins_are_those_that_browsers_send() -> None:
    found = load_config({"http_cors_origins": "https://a.example, http://b:8080"}, None, {})
    assert found.cors_origins == ("https://a.example", "http://b:8080")
    assert load_config({}, None, {}).cors_origins == ()
    assert load_config({"http_cors_origins": "*"}, None, {}).cors_origins == ("*",)
    for wrong in ("a.example", "https://a.example/", "https://a.example/chat", "*, a"):
        with pytest.raises(ConfigError, match="an origin is"):
            load_config({"http_cors_origins": wrong}, None, {})
