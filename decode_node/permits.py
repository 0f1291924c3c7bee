"""Which hand-offs a prefill node may begin: those that a router gave to it."""

from __future__ import annotations

from collections.abc import Mapping

from decode_node.stream import Stream
from paceline.config import NodeConfig
from paceline.errors import PermissionDenied
from paceline.rpc.grants import Grants
from paceline.v1 import handoff_pb2


class Permits:
    """Checks the grants of this node's tickets; without a key, as where a node runs alone, everything is permitted.

    ``streams``: by ticket, changed by the engine thread only.
    """

    def __init__(self, node_id: str, config: NodeConfig, streams: Mapping[str, Stream]) -> None:
        key = config.ticket_key.get_secret_value()
        self._node_id, self._streams = node_id, streams
        self._grants = Grants(key) if key else None

    def check(self, prefill_id: str, message: handoff_pb2.HandoffMessage) -> None:
        """PermissionDenied when ``message`` is the Begin of a ticket that no router gave to ``prefill_id``. A ticket
        that is not here (any more) is the receiver's to refuse."""
        stream = self._streams.get(message.ticket)
        if self._grants is None or stream is None or message.WhichOneof("body") != "begin":
            return
        salt = stream.request.cache_salt
        problem = self._grants.problem(message.begin.grant, message.ticket, prefill_id, self._node_id, salt)
        if problem is not None:
            raise PermissionDenied(problem)
