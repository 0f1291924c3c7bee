"""Server-sent events that have a name: ``event: NAME`` and ``data:`` with an object that says its type."""

from __future__ import annotations

from typing import Any

from cluster.frontdoor.http_errors import dumps

Event = dict[str, Any]  # its ``type`` is its name


def event_text(events: list[Event]) -> str:
    """The events as they are sent."""
    return "".join(f"event: {event['type']}\ndata: {dumps(event)}\n\n" for event in events)
