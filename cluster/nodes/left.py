"""Node processes that an earlier supervisor left running in Ray, for the next one to go on with."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util import list_named_actors

from cluster.nodes.places import give_all_back

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 3.0  # for all of them to say who they are


def find_left(name: str, roles: Mapping[str, str]) -> dict[str, tuple[dict[str, Any], Any]]:
    """What each node says of itself, and its actor, by node id: of its newest generation. All others are ended, and so
    is one that does not answer in time. name: their namespace. roles: of the nodes that are wanted. Blocks."""
    actors = _actors(name)
    asked = {actor.status.remote(): actor for actor in actors}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ASK_TIMEOUT_S) if asked else ([], [])
    found: dict[str, tuple[dict[str, Any], Any]] = {}
    for answer in done:
        with suppress(ray.exceptions.RayError):  # it has died
            status = ray.get(answer)
            wanted = roles.get(status["id"]) == status["role"] and status["alive"] and not status["fenced"]
            newest = status["id"] not in found or found[status["id"]][0]["generation"] < status["generation"]
            if wanted and newest:
                found[status["id"]] = status, asked[answer]
    used = {id(actor) for _, actor in found.values()}
    for actor in actors:
        if id(actor) not in used:
            end_left(actor)
    return found


def end_all(name: str) -> None:
    """End every node process of a namespace, and give their places back: they outlive who asked for them. Blocks."""
    for actor in _actors(name):
        end_left(actor)
    give_all_back(name)


def end_left(actor: Any) -> None:
    """End a node process. Never raises."""
    try:
        ray.kill(actor, no_restart=True)
    except (ValueError, ray.exceptions.RayError) as error:
        log.warning("a node that an earlier supervisor left could not be ended: %s", error)


def _actors(name: str) -> list[Any]:
    of_node = re.compile(rf"{re.escape(name)}/(prefill|decode)-\d+#\d+")
    actors = []
    for entry in list_named_actors(all_namespaces=True):
        if entry["namespace"] == name and of_node.fullmatch(entry["name"]):
            with suppress(ValueError):  # it is gone
                actors.append(ray.get_actor(entry["name"], namespace=name))
    return actors
