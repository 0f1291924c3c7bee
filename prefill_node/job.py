"""One prompt on a prefill node, from its RPC to the return of its pages."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kv_transfer.handoff.block import ByteClass, RowBlock
from paceline.errors import PacelineError
from paceline.grammar.compile import CompiledGrammar
from paceline.request import SequenceRequest
from paceline.spec_decode.sequence import Sequence
from paceline.tracing import NO_TRACE, Trace
from paceline.v1 import handoff_pb2, node_pb2


class JobPhase(enum.Enum):
    """Where a job stands; the edges are in engine/scheduler.py."""

    WAITING = "waiting"
    COMPUTING = "computing"
    HANDING_OVER = "handing_over"
    RELEASED = "released"


class Carrier(Protocol):
    """What a link offers to a job; no method blocks. Every job that was begun is answered once, by
    ``PrefillEngine.handoff_ended``."""

    def groups(self, layers: range, num_tokens: int) -> tuple[range, ...]:
        """The layers whose rows of a chunk are to be given to `rows` together, as each group is computed."""

    def begin(self, ticket: str, tokens: range, grant: bytes = b"") -> None:
        """Open the hand-off of the rows of ``tokens``. grant: the router's word that this node may."""

    def rows(self, ticket: str, block: RowBlock, slots: torch.Tensor) -> None:
        """Send the rows of ``block`` that lie at ``slots``, int64 [tokens of the block]."""

    def hidden_rows(self, ticket: str, rows: torch.Tensor, first_token: int) -> None:
        """Send ``rows`` [T, row_width]; the first of them is token ``first_token``."""

    def state(self, ticket: str, state: handoff_pb2.State, hidden: torch.Tensor | None) -> None:
        """Send the seed of decoding, which ends the hand-off. ``hidden``: [rows, hidden_size]."""

    def abort(self, ticket: str, reason: str) -> None:
        """Give the hand-off up, and tell the receiver why."""

    def bytes_sent(self, ticket: str) -> dict[ByteClass, int]:
        """Bytes sent of a ticket, by class."""

    def sending_s(self, ticket: str) -> float:
        """Seconds in which bytes of a ticket were being sent."""

    def lost(self, reason: str) -> None:
        """Give the link up: every job on it fails."""


@dataclass(eq=False)
class PrefillJob:
    """Made by the RPC; from then on the engine thread alone changes it."""

    request: SequenceRequest
    ticket: str
    first_token: int  # first row that decode lacks
    link: Carrier
    deadline: float  # to leave the line, monotonic clock
    emit: Callable[[node_pb2.PrefillEvent | PacelineError], None]  # thread-safe; an error or HandedOff is the last
    trace: Trace = NO_TRACE  # the engine thread's row; others record on rows of their own
    grammar: CompiledGrammar | None = None  # of the request, if it has one
    grant: bytes = b""  # the router's, for the ticket
    queued_at: float = field(default_factory=time.monotonic)
    phase: JobPhase = JobPhase.WAITING
    seq: Sequence | None = None  # the engine, when the job reaches the head of the line
    begun: bool = False  # the engine, with the first rows: pages wait for the hand-off's end from then on
    given_up: bool = False  # the engine: the RPC has its error, only the pages are still to come back
    waits_until: float = float("inf")  # the engine, when nothing is left to compute: the peer's answer is overdue then
    draft_sent: int = 0  # the engine: draft rows first_token.. to it have left
    computed_at: float = 0.0  # the engine, when the first token was sampled
