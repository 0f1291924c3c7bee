"""The transports by name, and the recipe for a new one: one file and one record."""

from __future__ import annotations

import threading
from typing import get_args
from unittest.mock import patch

import pytest
import torch

from kv_transfer.transports.base import Rank, Transport
from kv_transfer.transports.loopback import LoopbackTransport, loopback_pair
from kv_transfer.transports.registry import TRANSPORTS, OpenTransport, TransportRecord, open_transport
from kv_transfer.transports.rendezvous import Store
from paceline.config import NodeConfig
from paceline.errors import ConfigError
from support.exactness import run
from support.node_pair import pair
from support.tiny_model import tiny_request, tiny_runner


class MemoryLinks:
    """A transport inside one process: its file."""

    def __init__(self) -> None:
        self.opened: list[tuple[Rank, torch.device]] = []
        self._waiting: dict[str, LoopbackTransport] = {}
        self._cond = threading.Condition()

    def open(
        self, store: Store, link_id: str, rank: Rank, host: str, timeout_s: float, device: torch.device
    ) -> Transport:
        """See `OpenTransport`."""
        with self._cond:
            self.opened.append((rank, device))
            if link_id not in self._waiting:
                ends = loopback_pair()
                self._waiting[link_id] = ends[1 - rank]
                return ends[rank]
            return self._waiting.pop(link_id)

    def load(self) -> OpenTransport:
        """See `TransportRecord`."""
        return self.open


async def test_a_new_transport_is_one_file_and_one_record() -> None:
    links = MemoryLinks()
    options = {"drafter": "mtp", "num_draft_tokens": 3, "prefix_cache": False}
    requests = [tiny_request(index=i, temperature=i % 2) for i in range(3)]
    together = run(tiny_runner("bf16", **options), requests)
    config = NodeConfig.model_validate({"model": "tiny", "prefill_chunk_tokens": 5} | options)
    config = config.model_copy(update={"transport": "memory"})
    prefill, decode = tiny_runner("bf16", decodes=False, **options), tiny_runner("bf16", page_size=8, **options)
    with patch.dict(TRANSPORTS, memory=TransportRecord("memory", needs_cuda=False, load=links.load)):
        async with pair(config, prefill, decode) as nodes:
            for (outcome, answer), one in zip(await nodes.run(requests, 3), together, strict=True):
                assert outcome == one
                assert answer.handed_off is not None
                assert answer.handed_off.bytes.target_kv > 0
            await nodes.all_released()
    assert sorted(rank for rank, _ in links.opened) == [0, 1]
    assert {device.type for _, device in links.opened} == {"cpu"}


def test_the_option_lists_the_records() -> None:
    assert get_args(NodeConfig.model_fields["transport"].annotation) == tuple(TRANSPORTS)
    assert all(name == record.name for name, record in TRANSPORTS.items())


def test_rows_are_staged_where_the_transport_reads() -> None:
    pool = torch.device("cuda", 1)
    assert TRANSPORTS["nccl"].staging_device(pool) == pool
    assert TRANSPORTS["gloo"].staging_device(pool) == torch.device("cpu")


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'tin' is unknown; known are gloo, nccl"):
        open_transport("tin", None, "link", 0, "127.0.0.1", 1.0)  # type: ignore[arg-type]
