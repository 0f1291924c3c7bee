"""Options that another build of Paceline sent, as in the middle of a rolling upgrade."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from cluster.nodes.host import NodeHost
from cluster.state.registry_types import Registry
from cluster.supervision import options_digest
from paceline.config import NodeConfig, ServeConfig
from paceline.errors import ConfigError
from paceline.role_options import RoleOptions
from paceline.rpc.identity import Secret


def received(state: dict[str, Any]) -> NodeConfig:
    """The options as this build reads them, when another one has pickled ``state``."""
    found = NodeConfig.__new__(NodeConfig)
    found.__setstate__(pickle.loads(pickle.dumps(state)))
    return found


def sent(config: NodeConfig, **more: Any) -> dict[str, Any]:
    """What a build pickles whose options are those of ``config`` and ``more``, and the ones it says it has chosen."""
    state = config.__getstate__()
    return state | {"__dict__": state["__dict__"] | more}


def test_an_option_that_the_sender_does_not_know_has_its_default() -> None:
    config = NodeConfig(model="m", drafter="ngram")
    state = sent(config)
    del state["__dict__"]["kv_dtype"]
    found = received(state)
    assert found == config
    found.check_known()


def test_a_new_option_is_left_out_unless_the_sender_chose_it() -> None:
    state = sent(NodeConfig(model="m"), later=7)
    found = received(state)
    assert found == NodeConfig(model="m")
    found.check_known()

    found = received(state | {"chosen": [*state["chosen"], "later"]})
    with pytest.raises(ConfigError, match="later: the build of Paceline on this host does not know this option"):
        found.model_copy(update={"host": "127.0.0.2"}).check_known()  # as NodeHost keeps it
    node = NodeHost("decode", "decode-0", 1, found, Registry("unix:///nonexistent.sock", 1.0))
    with pytest.raises(ConfigError, match="later"):
        node.start()
    node.stop(0.0)

    del state["chosen"]  # an early build did not say: none of its options may be lost in silence
    with pytest.raises(ConfigError, match="later"):
        received(state).check_known()


def test_a_supervisor_of_another_build_goes_on_with_the_nodes(tmp_path: Path) -> None:
    """Mutant: an option that the last supervisor's build lacks makes its nodes others, and all of them are ended."""

    class LaterRole(RoleOptions):
        later: int | None = None

    class Later(ServeConfig):
        later: int = 0
        decode: LaterRole = LaterRole()

    (tmp_path / "secret").write_text("a secret of this deployment")
    secret = Secret.from_file(str(tmp_path / "secret"))
    chosen: dict[str, Any] = {"model": "m", "drafter": "ngram", "decode": {"page_size": 8}}
    known = options_digest(ServeConfig.model_validate(chosen), secret)
    assert options_digest(Later.model_validate(chosen), secret) == known
    for more in ({"drafter": "none"}, {"decode": {"page_size": 16}}, {"max_running": 3}):
        assert options_digest(ServeConfig.model_validate(chosen | more), secret) != known
