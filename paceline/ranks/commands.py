"""The fields of each kind of frame: what rank 0 tells its followers to do, and what they answer.

No frame holds anything but numbers and, where an option or an error crosses, UTF-8 text.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from paceline.attention.base import ForwardBatch, Segment, packed_rows
from paceline.ranks.channel import Array, Frame

MAX_ERROR_BYTES = 4096
DTYPES = (torch.bfloat16, torch.float32)  # of rows, by number
NOTHING: Array = np.empty(0, dtype=np.uint8)


def text_fields(text: str) -> list[Array]:
    """OPTIONS, READY, FAILED: one text."""
    return [np.frombuffer(text.encode(), dtype=np.uint8)]


def read_text(frame: Frame) -> str:
    """See text_fields."""
    return frame.fields(np.uint8)[0].tobytes().decode(errors="replace")


def batch_fields(batch: ForwardBatch, carried: bool = False) -> list[Array]:
    """FORWARD: token ids, positions and write slots [3 * T]; of each segment its rows and its slots; all slots; prefix
    lengths [T]; lengths of tails [T], all tails. carried: the batch's token ids come by the group, and here are those
    that the host knows, so that it need not wait for the device."""
    segments = batch.segments
    rows = packed_rows(segments) if carried else _rows_of(batch)
    used = [max(segment.prefix_lens) for segment in segments]
    tails = [tail for segment in segments for tail in (segment.tails or [()] * len(segment.token_ids))]
    return [
        rows.reshape(-1),
        np.array([len(segment.token_ids) for segment in segments], dtype=np.int64),
        np.array(used, dtype=np.int64),
        torch.cat([segment.slots[:count] for segment, count in zip(segments, used, strict=True)]).cpu().numpy(),
        np.array(list(chain.from_iterable(segment.prefix_lens for segment in segments)), dtype=np.int32),
        np.array([len(tail) for tail in tails], dtype=np.int32),
        np.array(list(chain.from_iterable(tails)), dtype=np.int32),
    ]


def _rows_of(batch: ForwardBatch) -> Array:
    return torch.cat((batch.token_ids, batch.positions, batch.write_slots)).cpu().numpy()


def read_batch(frame: Frame, device: torch.device) -> ForwardBatch:
    """See batch_fields; its tensors on ``device``. Raises ValueError where the lengths do not fit each other."""
    rows, sizes, used, slots, prefix_lens, tail_lens, tails = frame.fields(
        np.int64, np.int64, np.int64, np.int32, np.int32, np.int32, np.int32
    )
    ids, positions, write_slots = np.split(rows, 3)
    if not len(ids) == sizes.sum() == len(prefix_lens) == len(tail_lens):
        raise ValueError(f"{len(ids)} rows, {int(sizes.sum())} of segments")
    if len(slots) != used.sum() or len(tails) != tail_lens.sum():
        raise ValueError(f"{len(slots)} slots of {int(used.sum())}, {len(tails)} nodes of {int(tail_lens.sum())}")
    row_ends, slot_ends = np.cumsum(sizes), np.cumsum(used)
    nodes, tail_ends = tails.tolist(), np.cumsum(tail_lens).tolist()
    own_tails = [nodes[end - size : end] for end, size in zip(tail_ends, tail_lens.tolist(), strict=True)]
    segments = []
    for row_end, slot_end, size, count in zip(row_ends, slot_ends, sizes, used, strict=True):
        of_rows = slice(row_end - size, row_end)
        segments.append(
            Segment(
                ids[of_rows].tolist(),
                positions[of_rows].tolist(),
                write_slots[of_rows].tolist(),
                torch.from_numpy(slots[slot_end - count : slot_end]),
                prefix_lens[of_rows].tolist(),
                own_tails[of_rows],
            )
        )
    token_ids, places, slots_written = torch.from_numpy(rows).to(device).chunk(3)
    return ForwardBatch(token_ids, places, slots_written, tuple(segments))


def row_fields(rows: torch.Tensor, carried: bool = False) -> list[Array]:
    """LOGITS: number of rows, of columns and of the dtype; the rows [R, width], unless they come by the group."""
    shape = np.array([*rows.shape, DTYPES.index(rows.dtype)], dtype=np.int64)
    return [shape, NOTHING if carried else bytes_of(rows)]


def read_rows(frame: Frame, device: torch.device) -> torch.Tensor:
    """See row_fields; on ``device``, without a content where the group carries it."""
    shape, data = frame.fields(np.int64, np.uint8)
    count, width, dtype = shape.tolist()
    if not data.size:
        return torch.empty(count, width, dtype=DTYPES[dtype], device=device)
    return torch.from_numpy(data).view(DTYPES[dtype]).view(count, width).to(device)


def bytes_of(tensor: torch.Tensor) -> Array:
    """A tensor's bytes."""
    return tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class RowsCommand:
    """Tokens of some layers at some slots. ``after``: the number of the last command that comes before it."""

    layers: range
    slots: torch.Tensor  # int64 [T]
    after: int

    def fields(self, *more: Array) -> list[Array]:
        """GATHER; SCATTER with the rows' bytes."""
        head = np.array([self.layers.start, self.layers.stop, self.after], dtype=np.int64)
        return [head, self.slots.numpy(), *more]

    @classmethod
    def read(cls, head: Array, slots: Array) -> RowsCommand:
        """See fields."""
        start, stop, after = head.tolist()
        return cls(range(start, stop), torch.from_numpy(slots), after)


@dataclass(frozen=True)
class LaneCommand:
    """What a rank does with its lanes of a link (kv_transfer/lanes): rows of ``count`` tokens of ``layers``, in the
    buffers of one number. ``slots``: int64 [count] where rows leave or enter the pool, else [0]. ``after``: see
    RowsCommand."""

    link: int
    number: int
    layers: range
    count: int
    after: int
    slots: torch.Tensor

    def fields(self) -> list[Array]:
        """LANES_GATHER, LANES_SEND, LANES_RECEIVE, LANES_SCATTER."""
        numbers = [self.link, self.number, self.layers.start, self.layers.stop, self.count, self.after]
        return [np.array(numbers, dtype=np.int64), self.slots.numpy()]

    @classmethod
    def read(cls, frame: Frame) -> LaneCommand:
        """See fields."""
        head, slots = frame.fields(np.int64, np.int64)
        link, number, start, stop, count, after = head.tolist()
        return cls(link, number, range(start, stop), count, after, torch.from_numpy(slots))


def link_fields(link: int, *more: bytes) -> list[Array]:
    """LANES_END: the link's number. LANES_OPEN: with its options. LANES_KEY: with a key and its value."""
    return [np.array([link], dtype=np.int64), *(np.frombuffer(some, dtype=np.uint8) for some in more)]


def read_link(frame: Frame, num_more: int) -> tuple[int, list[bytes]]:
    """See link_fields."""
    head, *more = frame.fields(np.int64, *[np.uint8] * num_more)
    return int(head[0]), [some.tobytes() for some in more]


def copy_fields(layers: range, source: torch.Tensor, dest: torch.Tensor) -> list[Array]:
    """COPY_SLOTS: the layers' range; source and dest [n]."""
    return [np.array([layers.start, layers.stop], dtype=np.int64), *(slots.numpy() for slots in (source, dest))]


def read_copy(frame: Frame) -> tuple[range, torch.Tensor, torch.Tensor]:
    """See copy_fields."""
    layers, source, dest = frame.fields(np.int64, np.int64, np.int64)
    return range(*layers.tolist()), torch.from_numpy(source), torch.from_numpy(dest)


def id_fields(token_ids: torch.Tensor, carried: bool = False) -> list[Array]:
    """EMBED: how many token ids, [1]; the ids [T], unless they come by the group."""
    count = np.array([len(token_ids)], dtype=np.int64)
    return [count, NOTHING if carried else token_ids.to("cpu", torch.int64).numpy()]


def read_ids(frame: Frame, device: torch.device) -> torch.Tensor:
    """See id_fields; on ``device``, without a content where the group carries it."""
    count, ids = frame.fields(np.int64, np.int64)
    if not ids.size:
        return torch.empty(int(count[0]), dtype=torch.int64, device=device)
    return torch.from_numpy(ids).to(device)


def host_slots(slots: torch.Tensor) -> torch.Tensor:
    """Slots as they cross: int64, on the host."""
    return slots.to("cpu", torch.int64).contiguous()
