"""The fingerprint of a deployment changes with what its text depends on, and with nothing else."""

from __future__ import annotations

from cluster.serving_router import system_fingerprint
from paceline.config import ServeConfig


def test_it_changes_with_what_the_text_depends_on() -> None:
    config = ServeConfig(model="a")
    told = [
        system_fingerprint(config, ["x", "y"]),
        system_fingerprint(config, ["x", "z"]),  # other weights or kernels
        system_fingerprint(ServeConfig(model="b"), ["x", "y"]),
        system_fingerprint(ServeConfig(model="a", acceptance="typical"), ["x", "y"]),
    ]
    assert len(set(told)) == len(told)
    assert all(one.startswith("fp_") for one in told)


def test_it_stays_with_more_nodes_and_other_bounds() -> None:
    config = ServeConfig(model="a")
    more = ServeConfig(model="a", decode_nodes=3, max_inflight=7, num_draft_tokens=2)
    assert system_fingerprint(config, ["y", "x"]) == system_fingerprint(more, ["x", "y", "x"])
