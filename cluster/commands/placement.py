"""``paceline serve --dry-run``: where the nodes would be and what each rank would hold. It starts nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from cluster.nodes.bundles import GPU, Host, Wanted, check_room, place, where
from cluster.nodes.host_file import GIB, read_hosts, this_host
from cluster.nodes.roles import has_weights_together, wanted_place
from cluster.role_check import check_spec, roles_of
from cluster.supervision import wanted_nodes
from paceline.config import ServeConfig
from paceline.errors import ConfigError, NodeUnavailable
from paceline.role_options import Role

if TYPE_CHECKING:
    from paceline.assembly.model_plan import ModelPlan

HEADERS = ("host", "bundle", "node", "role", "ranks", "devices", "weights", "KV", "rank 0 in all")


@dataclass(frozen=True)
class RankBytes:
    """What a rank of a role's nodes holds."""

    weights: int
    first_weights: int  # of rank 0, which has the drafter
    kv: int
    first_kv: int

    @property
    def first(self) -> int:
        """All that rank 0 holds."""
        return self.first_weights + self.first_kv


def dry_run(config: ServeConfig, hosts_file: Path | None) -> None:
    """Print the placement. hosts_file: the hosts; None: those of the running Ray, or this machine where the options
    name none. Raises ConfigError and NodeUnavailable for what could not be placed."""
    hosts, fixed = _hosts(config, hosts_file)
    wanted = [wanted_place(node, config) for node in wanted_nodes(config, b"")]
    check_room(wanted, hosts, fixed=fixed)
    if left := place(wanted, hosts):
        names = ", ".join(node.node_id for node in left)
        raise NodeUnavailable(f"no host has room for {names} now: {where(hosts)}")
    planned = _planned(config)
    for line in _lines(config, hosts, planned):
        typer.echo(line)


def _hosts(config: ServeConfig, file: Path | None) -> tuple[list[Host], bool]:
    """And whether no other can come."""
    if file is not None:
        return read_hosts(file), True
    if config.ray_address == "local":
        return [this_host()], True
    from cluster.nodes.places import ray_hosts
    from cluster.nodes.ray_session import start_ray, stop_ray

    start_ray(config.ray_address)
    try:
        return ray_hosts(), False
    finally:
        stop_ray()


def _planned(config: ServeConfig) -> dict[Role, RankBytes]:
    """By role; prints what a node would refuse. Empty where the model is not on this host, or cannot be planned."""
    path = Path(config.model).expanduser()
    if not path.exists():
        typer.echo(f"{config.model} is no folder here, so memory is not planned; `paceline pull` prints its folder")
        return {}
    from paceline.assembly.model_plan import plan_model
    from paceline.models.registry import DTYPES

    found: dict[Role, RankBytes] = {}
    try:
        wanted = {(own.dtype, own.kv_dtype, own.on_gpu) for own in map(config.of_role, roles_of(config))}
        plans = {kinds: plan_model(path, DTYPES[kinds[0]], kinds[1], kinds[2]) for kinds in wanted}
        for role in roles_of(config):
            own = config.of_role(role)
            plan = plans[own.dtype, own.kv_dtype, own.on_gpu]
            plan.check_degree(own.tp)
            found[role] = _bytes_of(plan, own)
        check_spec(config, plan.spec)
    except ConfigError as refused:
        typer.echo(f"refused when served: {refused}")
    return found


def _bytes_of(plan: ModelPlan, config: ServeConfig) -> RankBytes:
    """config: the role's."""
    if config.attention_dp > 1:
        plan = plan.dealt(config.tp)
    tokens = -(-config.kv_cache_tokens // config.page_size) * config.page_size
    others = sum(part.of_rank(config.tp, first=False) for part in plan.parts)
    return RankBytes(
        weights=others if config.tp > 1 else plan.weight_bytes(),
        first_weights=plan.weight_bytes(config.tp),
        kv=tokens * (plan.target_kv_bytes(config.tp) if config.tp > 1 else plan.kv_bytes()),
        first_kv=tokens * plan.kv_bytes(config.tp),
    )


def _lines(config: ServeConfig, hosts: Sequence[Host], planned: dict[Role, RankBytes]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [HEADERS]
    rows += [_row(config, host, node, number, planned) for host, node, number in _bundles(hosts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for host, node, _ in _bundles(hosts):
        role = _role(node)
        if role in planned and (short := _short(config.of_role(role), host, planned[role])):
            yield f"{node.node_id} does not fit: {short}"
    for host in hosts:
        yield from _short_together(config, host, planned)


def _bundles(hosts: Sequence[Host]) -> Iterator[tuple[Host, Wanted, int]]:
    """Every node with its host and the number of its bundle there."""
    for host in hosts:
        for number, node in enumerate(host.nodes):
            yield host, node, number


def _row(config: ServeConfig, host: Host, node: Wanted, number: int, planned: dict[Role, RankBytes]) -> tuple[str, ...]:
    role = _role(node)
    own, held = config.of_role(role), planned.get(role)
    devices = f"{node.gpus} {GPU}" if node.gpus else own.device
    told = ("?", "?", "?") if held is None else tuple(f"{n / GIB:.2f} GiB" for n in (held.weights, held.kv, held.first))
    return host.address, str(number), node.node_id, role, str(own.tp), devices, *told


def _short(config: ServeConfig, host: Host, held: RankBytes) -> str:
    """Why a node's ranks need more memory than their devices have; empty where they do not, or nobody knows."""
    if config.device == "cuda" and 0 < host.gpu_memory_gib * GIB < held.first:
        return f"rank 0 needs {held.first / GIB:.2f} GiB, a GPU of {host.address} has {host.gpu_memory_gib:.2f}"
    whole = _all_ranks(config, held)
    if config.device == "cpu" and 0 < host.memory_gib * GIB < whole:
        return f"its ranks need {whole / GIB:.2f} GiB, {host.address} has {host.memory_gib:.2f}"
    return ""


def _all_ranks(config: ServeConfig, held: RankBytes) -> int:
    """Bytes of a node of a role. config: the role's."""
    return held.first + (config.tp - 1) * (held.weights + held.kv)


def _short_together(config: ServeConfig, host: Host, planned: dict[Role, RankBytes]) -> Iterator[str]:
    """Why nodes that share the memory of a host, or of a GPU, do not fit beside each other."""
    needs: Counter[str] = Counter()
    counted = set()  # weights that nodes have together
    for role in (role for role in map(_role, host.nodes) if role in planned):
        own, held = config.of_role(role), planned[role]
        needs[own.device] += _all_ranks(own, held)
        if config.ray_address == "local" and has_weights_together(own):
            needs[own.device] -= held.first_weights if own.dtype in counted else 0
            counted.add(own.dtype)
    for device, needed in needs.items():
        has = {"cpu": host.memory_gib, "cuda": 0.0}.get(device, host.gpu_memory_gib)
        if 0 < has * GIB < needed:
            told = f"they need {needed / GIB:.2f} GiB, it has {has:.2f}"
            yield f"the nodes on {device} of {host.address} do not fit beside each other: {told}"


def _role(node: Wanted) -> Role:
    return cast(Role, node.node_id.partition("-")[0])
