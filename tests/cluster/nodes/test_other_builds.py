"""Options that another build of Paceline sent, as in the middle of a rolling upgrade."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from cluster.nodes.host import NodeHost
from cluster.state.registry_types import Registry
from paceline.config import NodeConfig
from paceline.errors import ConfigError


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
