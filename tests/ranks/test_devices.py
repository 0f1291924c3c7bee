"""Which GPU a rank has, what is refused before anything is loaded, and when a GPU's collective is late. There is no GPU
here: its events are scripted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.config import NodeConfig
from paceline.errors import ConfigError, NodeUnavailable
from paceline.ranks.collective import CollectiveGroup
from paceline.ranks.communicators import torch_dist
from paceline.ranks.devices import NCCL_INTERFACE, check_devices, meeting, rank_device, sums_of

CUDA = torch.device("cuda:0")


class Event:
    """Happens when the test says so."""

    happened = False

    def record(self, stream: object) -> None:
        return

    def query(self) -> bool:
        return Event.happened


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> CollectiveGroup:
    monkeypatch.setattr(Event, "happened", False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return CollectiveGroup(0, 2, CUDA, torch_dist.HashStore, timeout_s=0.05)


def test_devices() -> None:
    assert [rank_device("cuda", rank).index for rank in range(3)] == [0, 1, 2]
    assert rank_device("cuda:4", 2) == torch.device("cuda:6")
    assert rank_device("cpu", 2) == torch.device("cpu")
    assert [sums_of(NodeConfig(tp=2, device=device)) for device in ("cpu", "cuda:1")] == ["sockets", "collective"]


@pytest.mark.parametrize(
    ("device", "seen", "nccl", "option", "why"),
    [
        ("cuda", 2, True, "tp", "4 ranks .* from cuda:0 on there are 2 GPUs of 2"),
        ("cuda:6", 8, True, "tp", "4 ranks .* from cuda:6 on there are 2 GPUs of 8"),
        ("cuda:9", 8, True, "tp", "there are 0 GPUs of 8"),
        ("cuda", 8, False, "rank_sums", "NCCL is not in this build"),
    ],
)
def test_refused(device: str, seen: int, nccl: bool, option: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    with pytest.raises(ConfigError, match=why) as refused:
        check_devices(NodeConfig(tp=4, device=device))
    assert refused.value.key == option


def test_a_meeting_is_private_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL keeps to loopback where it carries nothing else. Mutant: the links' interface is taken from them."""
    monkeypatch.setenv(NCCL_INTERFACE, "=eth1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with meeting(NodeConfig(tp=2, device="cuda", transport="nccl")) as place:
        assert Path(place).parent.stat().st_mode & 0o777 == 0o700
    assert not Path(place).parent.exists()
    assert os.environ[NCCL_INTERFACE] == "=eth1"
    with meeting(NodeConfig(tp=2, device="cuda")):
        assert os.environ[NCCL_INTERFACE] == "=lo"
    with meeting(NodeConfig(tp=2)) as place:
        assert place == ""


def test_a_collective_on_a_gpu_that_does_not_end_is_late(
    group: CollectiveGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: marks are never looked at; a wait has no deadline; what was aborted passes for done."""
    assert group.late() == ""
    assert group._marks is not None
    group._marks.put()
    with pytest.raises(NodeUnavailable, match="did not come within"):
        group.finish()
    assert "is due for" in group.late()
    monkeypatch.setattr(Event, "happened", True)
    assert group.late() == ""
    group.finish()
    group.shut()
    with pytest.raises(NodeUnavailable, match="the ranks have ended"):
        group.finish()
