"""Server-sent events that have a name: ``event: NAME`` and ``data:`` with an object that says its type."""

from __future__ import annotations

from typing import Any

from cluster.frontdoor.http_errors import dumps

Event = dict[str, Any]  # its ``type`` is its name


def event_text(events: list[Event], last_id: str = "") -> str:
    """The events as they are sent. last_id: of the last one; empty for none."""
    texts = [f"event: {event['type']}\ndata: {dumps(event)}\n\n" for event in events]
    if last_id:
        texts[-1] = f"id: {last_id}\n{texts[-1]}"
    return "".join(texts)
