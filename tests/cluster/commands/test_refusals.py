"""What a command says when it ends with an error: the message as it is, and as soon as it can be known."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from cluster.commands import cli
from cluster.commands.reach import next_step
from cluster.nodes.listening import check_addresses, check_free, warn_of_clear_keys, warn_of_clear_nodes
from cluster.serving_router import check_front
from paceline.client import Client
from paceline.config import ServeConfig
from paceline.errors import ConfigError, NodeUnavailable, PacelineError, Unauthenticated


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (
            ConfigError("attention", "pip install 'paceline[gpu]'"),
            "error --attention: pip install 'paceline[gpu]'\n",
            2,
        ),
        (ConfigError("grpc", "127.0.0.1:x: no"), "error --grpc: 127.0.0.1:x: no\n", 2),
        (NodeUnavailable("[red]decode-0[/red] is gone"), "error [red]decode-0[/red] is gone\n", 1),
        (
            Unauthenticated("an API key is needed"),
            "error an API key is needed; --api-key-file FILE or the variable PACELINE_API_KEY gives the key\n",
            1,
        ),
    ],
)
def test_a_message_is_printed_as_it_is(
    error: PacelineError, line: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("option", ["grpc", "http", "admin"])
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", ":8000", "127.0.0.1:x", "here"])
def test_an_address_that_is_none_is_named(option: str, address: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT") as caught:
        check_addresses(ServeConfig.model_validate({option: address}))
    assert caught.value.key == option


def test_addresses_that_are_right() -> None:
    check_addresses(ServeConfig())
    check_addresses(ServeConfig(grpc="127.0.0.1:0", http="[::1]:8000", admin="localhost:50052"))


@pytest.mark.parametrize("option", ["grpc", "http", "admin"])
def test_an_address_that_is_taken_is_named_before_anything_starts(option: str) -> None:
    free = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0"}
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cannot listen at .*port 0 takes a free one") as caught:
            check_free(ServeConfig.model_validate(free | {option: taken}))
    assert caught.value.key == option
    check_free(ServeConfig.model_validate(free | {option: taken}))  # nothing is held


def test_two_options_with_one_address_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        one = f"127.0.0.1:{other.getsockname()[1]}"
    with pytest.raises(ConfigError, match="cannot listen") as caught:
        check_free(ServeConfig(grpc=one, http=one))
    assert caught.value.key == "http"


def test_the_client_alone_has_no_command() -> None:
    code = "import sys; sys.modules['typer'] = None; import cluster.commands.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "error typer is not installed; the command needs pip install 'paceline[node]'\n",
    )


def test_keys_that_cross_the_network_in_the_clear_are_told(caplog: pytest.LogCaptureFixture) -> None:
    config = ServeConfig(api_keys="keys.yaml", grpc="0.0.0.0:1", http="127.0.0.1:2", admin="10.0.0.1:3")
    warn_of_clear_keys(config, clients_tls=False, parts_tls=False)
    warn_of_clear_keys(config, clients_tls=True, parts_tls=False)
    warn_of_clear_keys(config, clients_tls=True, parts_tls=True)
    told = [record.getMessage().partition("clear: ")[2].partition(" have")[0] for record in caplog.records]
    assert told == ["grpc 0.0.0.0:1, admin 10.0.0.1:3", "admin 10.0.0.1:3"]


def test_nodes_that_other_hosts_reach_in_the_clear_are_told(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_clear_nodes(["127.0.0.1:1", "[::1]:2"], parts_tls=False)
    warn_of_clear_nodes(["10.0.0.1:3"], parts_tls=True)
    assert caplog.text == ""
    warn_of_clear_nodes(["10.0.0.2:3", "127.0.0.1:1", "10.0.0.1:3"], parts_tls=False)
    assert "nodes at 10.0.0.1:3, 10.0.0.2:3 have no TLS" in caplog.text


@pytest.mark.parametrize("url", ["rediz://:p4ss@host/0", "redis://:p4/ss@host/0", "redis://:p4ss@host:99999/0"])
async def test_what_is_no_redis_is_named_and_not_repeated(url: str) -> None:
    """Mutants: a traceback; the URL, or the part of the password that was taken for a port, in the message."""
    with pytest.raises(ConfigError, match=r"^redis: is no URL of a Redis") as told:
        await check_front(ServeConfig(redis=url))
    assert "p4" not in str(told.value)


def test_a_command_that_reaches_nobody_says_what_to_try() -> None:
    """Real gRPC's words, which may change with its version."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        nobody = f"127.0.0.1:{one.getsockname()[1]}"
    with Client(nobody, retries=0) as client, pytest.raises(NodeUnavailable) as caught:
        client.generate("x", max_tokens=1)
    assert "--grpc address of a running `paceline serve`" in next_step(caught.value)
