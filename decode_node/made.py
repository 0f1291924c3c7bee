"""The tokens that this node makes and made lately, for a router that goes on with a stream which another one told.

Clients of server-sent events cannot send their tokens back, and what a router wrote of them to Redis is behind, or gone
with it (`cluster/routing/recall.py`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from decode_node.stream import Stream
from paceline.errors import InvalidRequest
from paceline.request import MAX_N
from paceline.v1 import node_pb2
from paceline.wire import sequence_digest

KEPT_TOKENS = 1 << 20  # 4 MiB, of sequences that ended or whose router left


class MadeTokens:
    """By digest of their sequence. Event loop."""

    def __init__(self, kept_tokens: int = KEPT_TOKENS) -> None:
        self._most = kept_tokens
        self._running: dict[bytes, list[Stream]] = {}
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()  # oldest first
        self._num_kept = 0

    @contextmanager
    def of(self, request: node_pb2.SequenceRequest, stream: Stream) -> Iterator[None]:
        """Around the call of a stream: its tokens are known meanwhile, and for a while after."""
        digest = sequence_digest(request)
        self._running.setdefault(digest, []).append(stream)
        try:
            yield
        finally:
            streams = self._running[digest]
            streams.remove(stream)
            if not streams:
                del self._running[digest]
            self._keep(digest, _made_by(stream))

    def _keep(self, digest: bytes, token_ids: Sequence[int]) -> None:
        before = self._kept.pop(digest, array("i"))
        self._num_kept -= len(before)
        longest = array("i", token_ids) if len(token_ids) > len(before) else before
        if not longest:
            return
        self._kept[digest] = longest
        self._num_kept += len(longest)
        while self._num_kept > self._most:
            _, dropped = self._kept.popitem(last=False)
            self._num_kept -= len(dropped)

    def recall(self, request: node_pb2.RecallRequest) -> node_pb2.RecallResponse:
        """The first tokens of each sequence, none of one that is not known. InvalidRequest for too many."""
        if len(request.sequences) > MAX_N:
            raise InvalidRequest("sequences", f"must be at most {MAX_N}, got {len(request.sequences)}")
        made = [self._find(asked.digest)[: asked.num_tokens] for asked in request.sequences]
        return node_pb2.RecallResponse(made=[node_pb2.MadeTokens(token_ids=token_ids) for token_ids in made])

    def _find(self, digest: bytes) -> Sequence[int]:
        found: list[Sequence[int]] = [_made_by(stream) for stream in self._running.get(digest, ())]
        return max([*found, self._kept.get(digest, array("i"))], key=len)


def _made_by(stream: Stream) -> Sequence[int]:
    """What was told of its output, resumed tokens included. A step that failed may have committed wrong ones behind."""
    told = max(stream.num_told, len(stream.request.output_token_ids))
    return () if stream.seq is None else stream.seq.output_token_ids[:told]
