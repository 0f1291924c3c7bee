"""Where nodes get their places when hosts are missing; Ray is only pretended."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cluster.nodes import places
from cluster.nodes.bundles import Host, Wanted, check_room, place
from cluster.nodes.places import Places
from cluster.nodes.roles import wanted_place
from cluster.state.wanted import WantedNode
from paceline.config import ServeConfig
from paceline.errors import ConfigError, InvalidRequest, NodeUnavailable
from paceline.role_options import RoleOptions

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
    monkeypatch.setattr(places, "ray_hosts", lambda: [host(name, {name: 1.0}) for name in sorted(made.hosts)])
    return made


def host(address: str, resources: dict[str, float]) -> Host:
    return Host(address, {"CPU": 8.0} | resources, {"CPU": 8.0} | resources)


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
    wanted = [Wanted("prefill-0", gpus=1), Wanted("decode-0", vital=True, gpus=1)]
    assert [node.bundle["GPU"] for node in wanted] == [1.0, 1.0]
    monkeypatch.setattr(places, "ALONE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(places, "ray_hosts", lambda: [host("h", {"GPU": 1.0})])
    told = r"2 of 'GPU' asked, 1 there; --device cuda:0.*: h has 1 of 1 GPU free"
    with pytest.raises(NodeUnavailable, match=told):
        Places("blue", wanted)


def role_nodes(prefill: int, decode: int, **options: object) -> list[Wanted]:
    """Nodes of a deployment whose decode nodes have four ranks, and whose prefill nodes have two."""
    tp = {"prefill": RoleOptions(tp=2), "decode": RoleOptions(tp=4)}
    config = ServeConfig.model_validate({"device": "cuda", "decode_nodes": decode} | tp | options)
    nodes = [WantedNode(f"prefill-{i}", "prefill") for i in range(prefill)]
    nodes += [WantedNode(f"decode-{i}", "decode") for i in range(decode)]
    return [wanted_place(node, config) for node in nodes]


def test_ranks_of_a_node_have_one_place_with_a_gpu_each() -> None:
    """Mutants: a bundle a rank, which Ray may put on several hosts; a standby that keeps the GPUs of its node."""
    prefill, decode = role_nodes(1, 1)
    assert (prefill.bundle["GPU"], decode.bundle["GPU"], decode.standby) == (2.0, 4.0, False)
    assert [node.bundle.get("GPU", 0) for node in role_nodes(1, 1, device="cuda:0")] == [0, 0]
    assert [node.bundle["CPU"] for node in role_nodes(1, 1, device="cpu", threads_per_node=3)] == [0.01, 0.01]
    (_, decode) = role_nodes(1, 1, device="cpu", threads_per_node=12, ray_address="auto")
    assert (decode.bundle["CPU"], decode.standby) == (12.0, True)


def test_a_host_that_can_never_hold_a_node_is_told_at_once_and_one_that_is_not_there_is_waited_for() -> None:
    """Mutants: GPUs of several hosts are counted together; a cluster whose hosts still come is refused."""
    six = [host("10.0.0.2", {"GPU": 3.0}), host("10.0.0.3", {"GPU": 3.0})]
    with pytest.raises(
        ConfigError, match=r"decode-0 needs 4 GPU on one host: 10\.0\.0\.2 has 3 of 3 GPU free; 10"
    ) as told:
        check_room(role_nodes(1, 1), six, fixed=False)
    assert told.value.key == "decode_tp"
    check_room(role_nodes(1, 1, decode_resource="d"), [host("10.0.0.2", {})], fixed=False)
    one = [host("127.0.0.1", {"GPU": 6.0})]
    check_room(role_nodes(1, 1), one, fixed=True)
    with pytest.raises(ConfigError, match=r"prefill-1 needs 2 GPU on one host beside 2 other nodes: 127\.0\.0\.1 has"):
        check_room(role_nodes(2, 1), one, fixed=True)
    hosts = [host("a", {"GPU": 8.0}), host("b", {"GPU": 4.0})]
    assert [node.node_id for node in place(role_nodes(2, 2), hosts)] == []
    assert [[node.node_id for node in each.nodes] for each in hosts] == [
        ["decode-1", "prefill-0", "prefill-1"],
        ["decode-0"],  # which leaves the larger host whole for the next
    ]


def test_a_node_keeps_its_place_in_a_role_that_fits_there(cluster: Cluster) -> None:
    """Mutant: no check, and the node that has drained never starts again."""
    cluster.hosts.add("GPU")
    made = Places("blue", role_nodes(1, 1))
    made.check_fits(Wanted("decode-0", gpus=2))
    with pytest.raises(InvalidRequest, match=r"prefill-0 would need 4 GPU, its place has 2 GPU, 0\.01 CPU: add a node"):
        made.check_fits(Wanted("prefill-0", gpus=4))
