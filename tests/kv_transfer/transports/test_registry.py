"""The transports by name."""

from __future__ import annotations

import pytest
import torch

from kv_transfer.transports.base import MESSAGE_BYTES
from kv_transfer.transports.registry import LARGE_LINKS, agreed_multiple, offered_bytes, open_transport, staging_device
from paceline.config import NodeConfig
from paceline.engine_config import choices_of
from paceline.errors import ConfigError
from paceline.transports import TRANSPORTS


def test_the_option_lists_the_records() -> None:
    assert choices_of(NodeConfig.model_fields["transport"]) == tuple(TRANSPORTS)
    assert all(name == record.name for name, record in TRANSPORTS.items())


def test_rows_are_staged_where_the_transport_reads() -> None:
    pool = torch.device("cuda", 1)
    assert staging_device("nccl", pool) == pool
    assert staging_device("gloo", pool) == torch.device("cpu")


def test_nccl_has_larger_messages_for_a_bounded_number_of_links() -> None:
    """Mutant: for every link."""
    assert offered_bytes("gloo", 0) == MESSAGE_BYTES
    assert [offered_bytes("nccl", num) >> 20 for num in (0, LARGE_LINKS - 1, LARGE_LINKS)] == [32, 32, 4]


@pytest.mark.parametrize(("told_mib", "multiple"), [(0, 1), (1, 1), (4, 1), (15, 3), (32, 8), (4096, 8)])
def test_the_smaller_offer_wins(told_mib: int, multiple: int) -> None:
    assert agreed_multiple(32 << 20, told_mib << 20) == multiple


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'tin' is unknown; known are gloo, nccl"):
        open_transport("tin", None, "link", 0, "127.0.0.1", 1.0)
