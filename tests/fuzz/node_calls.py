"""The RPCs between router and nodes: valid messages to begin with. Who sends wrong ones there is a bug of ours, or
somebody within the network; the node has to live on all the same."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from paceline.v1 import common_pb2, handoff_pb2, node_pb2, trace_pb2
from tests.fuzz.grpc_calls import Rpc

PREFILL, DECODE = "/paceline.v1.PrefillNode", "/paceline.v1.DecodeNode"
PREFILL_RPCS = (
    Rpc(f"{PREFILL}/Prefill", node_pb2.PrefillEvent, streams_out=True, weight=6),
    Rpc(f"{PREFILL}/Connect", node_pb2.ConnectResponse, weight=2),
    Rpc(f"{PREFILL}/Status", node_pb2.StatusResponse),
    Rpc(f"{PREFILL}/Trace", trace_pb2.TraceResponse),
)
DECODE_RPCS = (
    # The first event is the reservation; who leaves then gives it back.
    Rpc(f"{DECODE}/Decode", node_pb2.DecodeEvent, streams_out=True, endless=True, weight=6),
    Rpc(f"{DECODE}/Pair", handoff_pb2.PairResponse, weight=2),
    Rpc(f"{DECODE}/Handoff", handoff_pb2.HandoffAck, streams_in=True, streams_out=True, weight=4),
    Rpc(f"{DECODE}/Status", node_pb2.StatusResponse),
    Rpc(f"{DECODE}/Trace", trace_pb2.TraceResponse),
)


class NodeMessages:
    """Makes valid messages for the nodes of a deployment."""

    def __init__(self, addresses: Mapping[str, str], fingerprint: handoff_pb2.Fingerprint) -> None:
        self._decode, self._fingerprint = addresses["decode"], fingerprint

    def __call__(self, rng: random.Random, rpc: Rpc) -> Any:
        """One that the RPC understands; the hand-off's tickets and links are nobody's."""
        match rpc.path.rpartition("/")[2]:
            case "Prefill":
                address = rng.choice((self._decode, self._decode, "127.0.0.1:1"))
                return node_pb2.PrefillRequest(sequence=_sequence(rng), ticket="t", decode_address=address)
            case "Decode":
                return node_pb2.DecodeRequest(sequence=_sequence(rng), local_prefill=rng.random() < 0.5)
            case "Connect":
                return node_pb2.ConnectRequest(decode_address=self._decode)
            case "Pair":
                other = handoff_pb2.Fingerprint(model="another")
                other.MergeFrom(self._fingerprint)
                other.hidden_size += 1
                return handoff_pb2.PairRequest(prefill_node_id="prefill-9", fingerprint=other)
            case "Handoff":
                return _handoff(rng)
            case "Recall":
                asked = node_pb2.RecallSequence(digest=rng.randbytes(32), num_tokens=rng.choice((0, 5, 2**32 - 1)))
                return node_pb2.RecallRequest(sequences=[asked] * rng.choice((0, 1, 128, 129)))
            case "Trace":
                return trace_pb2.TraceRequest(request_id="fuzz-1")
        return node_pb2.StatusRequest()


def _sequence(rng: random.Random) -> node_pb2.SequenceRequest:
    return node_pb2.SequenceRequest(
        request_id=rng.choice(("", "fuzz-1")),
        prompt_token_ids=[rng.randrange(258) for _ in range(rng.randint(1, 20))],
        output_token_ids=[rng.randrange(258) for _ in range(rng.choice((0, 0, 2)))],
        sampling=common_pb2.SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=1, max_tokens=rng.randint(3, 6)),
        speculation=common_pb2.Speculation(num_draft_tokens=2),
    )


def _handoff(rng: random.Random) -> handoff_pb2.HandoffMessage:
    bodies: tuple[dict[str, Any], ...] = (
        {"hello": handoff_pb2.Hello(link_id="a")},
        {"begin": handoff_pb2.Begin(num_tokens=5)},
        {
            "chunk": handoff_pb2.Chunk(
                byte_class=handoff_pb2.BYTE_CLASS_TARGET_KV, num_layers=1, num_tokens=5, num_bytes=9
            )
        },
        {"state": handoff_pb2.State(first_token_id=5, proposal_depth=1, proposal_width=1, proposal_ids=[1])},
        {"abort": handoff_pb2.Abort(reason="x")},
    )
    return handoff_pb2.HandoffMessage(ticket=rng.choice(("", "t")), **rng.choice(bodies))
