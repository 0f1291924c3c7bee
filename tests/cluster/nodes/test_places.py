"""Where nodes get their places when hosts are missing; Ray is only pretended."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cluster.nodes import places
from cluster.nodes.places import Places, Wanted
from paceline.errors import NodeUnavailable

WANTED = [Wanted("prefill-0", "a"), Wanted("decode-0", "b", vital=True), Wanted("decode-1", "c", vital=True)]


@dataclass
class Cluster:
    """Hosts by the resource that each has one of; whoever waits for a place gets it as soon as there is one."""

    hosts: set[str]
    waits: list[float] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def placement_group(self, bundles: list[dict[str, float]], strategy: str, name: str, lifetime: str | None) -> Group:
        return Group(self, {resource for bundle in bundles for resource in bundle} - {"CPU"}, name)


@dataclass(frozen=True)
class Group:
    cluster: Cluster
    resources: set[str]
    id: str

    def wait(self, timeout_s: float) -> bool:
        self.cluster.waits.append(timeout_s)
        return self.resources <= self.cluster.hosts


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster({"a", "b", "c"})
    monkeypatch.setattr(places, "placement_group", made.placement_group)
    monkeypatch.setattr(places, "remove_placement_group", lambda group: made.removed.append(group.id))
    monkeypatch.setattr("cluster.nodes.places.ray.cluster_resources", lambda: dict.fromkeys(made.hosts, 1.0))
    return made


def test_all_are_placed_together_where_there_is_room(cluster: Cluster) -> None:
    made = Places("blue", WANTED)
    assert [made.of(node.node_id)[1] for node in WANTED] == [0, 1, 2]
    assert {made.of(node.node_id)[0].id for node in WANTED} == {"blue"}
    cluster.hosts.clear()  # a host that is lost later says nothing of the places on the others
    assert all(made.there(node.node_id) for node in WANTED)
    made.close()
    assert cluster.removed == ["blue"]


@pytest.mark.parametrize("missing", ["a", "c"])
def test_a_missing_host_keeps_no_other_node_from_its_place(cluster: Cluster, missing: str) -> None:
    cluster.hosts.remove(missing)
    made = Places("blue", WANTED)
    assert cluster.removed == ["blue"]
    assert [node.resource for node in WANTED if not made.there(node.node_id)] == [missing]
    cluster.hosts.add(missing)
    assert all(made.there(node.node_id) for node in WANTED)
    assert [made.of(node.node_id)[0].id for node in WANTED] == [f"blue/{node.node_id}" for node in WANTED]
    made.close()
    assert len(cluster.removed) == 4


def test_without_a_place_for_any_decode_node_it_is_one_error(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "ALONE_TIMEOUT_S", 0.01)
    cluster.hosts -= {"b", "c"}
    with pytest.raises(NodeUnavailable, match=r"could not place 3 nodes .* 1 of 'b' asked, 0 there; 1 of 'c' asked, 0"):
        Places("blue", WANTED)
    assert len(cluster.removed) == 4


def test_places_that_nobody_goes_on_with_are_given_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a GPU is kept from every later start. Mutant: the places of nodes that were added are left."""
    there = [("blue", "CREATED"), ("blue/decode-2", "PENDING"), ("blue/decode-1", "REMOVED"), ("blue2", "CREATED")]
    table = {str(number): {"name": name, "state": state} for number, (name, state) in enumerate(there)}
    monkeypatch.setattr(places, "placement_group_table", lambda: table)
    monkeypatch.setattr(places, "get_placement_group", lambda name: Group(cluster, set(), name))
    places.give_all_back("blue")
    assert cluster.removed == ["blue", "blue/decode-2"]


def test_every_node_has_a_gpu_of_its_own_and_too_few_are_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: a place without a GPU, so that two nodes take the first one; a message that does not count them."""
    wanted = [Wanted("prefill-0", gpu=True), Wanted("decode-0", vital=True, gpu=True)]
    assert [node.bundle["GPU"] for node in wanted] == [1.0, 1.0]
    monkeypatch.setattr(places, "ALONE_TIMEOUT_S", 0.0)
    monkeypatch.setattr("cluster.nodes.places.ray.cluster_resources", lambda: {"GPU": 1.0})
    with pytest.raises(NodeUnavailable, match="2 of 'GPU' asked, 1 there; --device cuda:0"):
        Places("blue", wanted)
