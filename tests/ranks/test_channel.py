"""What a rank does with an end that sends its bytes late, or takes none."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from paceline.errors import NodeUnavailable
from paceline.ranks import channel
from paceline.ranks.channel import FIELD, HEADER, MAGIC, VERSION, Channel, Kind

LIMIT_S = 0.3


def test_a_frame_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: every read waits anew."""
    monkeypatch.setattr(channel, "FRAME_TIMEOUT_S", LIMIT_S)
    ours, theirs = socket.socketpair()
    end, ended = Channel(ours), threading.Event()

    def trickle() -> None:
        theirs.send(HEADER.pack(MAGIC, VERSION, Kind.PART, 1, 1000))
        while not ended.wait(LIMIT_S / 6):
            theirs.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    with pytest.raises(NodeUnavailable, match="the other rank is silent"):
        end.receive(10.0)
    ended.set()
    thread.join()
    with pytest.raises(NodeUnavailable, match="PART was not taken within"):
        end.send(Kind.PART, 1, [np.zeros(1 << 23, dtype=np.uint8)])
    assert time.monotonic() - began < 5.0
    end.close()
    theirs.close()


def test_frames_larger_than_a_buffer_cross_both_ways_at_once() -> None:
    ends = [Channel(end) for end in socket.socketpair()]
    data = np.arange(1 << 20)
    sending = [threading.Thread(target=end.send, args=(Kind.PART, 1, [data])) for end in ends]
    for thread in sending:
        thread.start()
    frames = [end.receive(10.0) for end in ends]
    for thread, end, frame in zip(sending, ends, frames, strict=True):
        thread.join()
        assert len(frame.body) == data.nbytes + FIELD.size
        assert np.array_equal(frame.fields(np.int64)[0], data)
        end.close()
