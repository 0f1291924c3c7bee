"""What a follower must know before it can load its part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from json import dumps, loads

from paceline.config import NodeConfig
from paceline.option_values import LogFormat, LogLevel


@dataclass(frozen=True)
class FollowerOptions:
    """Crosses as JSON in the first frame. No secret of the deployment is in it."""

    folder: str
    dtype: str
    kv_dtype: str
    quantize: str
    degree: int
    rank: int
    dealt: bool  # see Shard
    device: str  # the node's
    bits: str
    meeting: str  # path of a file where the ranks meet; empty: their sockets are all they need
    num_pages: int
    page_size: int
    threads: int
    attention: str
    longest: int  # positions, of a context
    weight_file: str
    log_level: LogLevel
    log_format: LogFormat

    @classmethod
    def of(cls, config: NodeConfig, folder: str, rank: int, num_pages: int, meeting: str = "") -> FollowerOptions:
        """What rank ``rank`` of a node is told. num_pages: in its pool. meeting: see devices.meeting."""
        return cls(
            folder=folder,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,
            quantize=config.quantize,
            degree=config.tp,
            rank=rank,
            dealt=config.attention_dp > 1,
            device=config.device,
            bits=config.bits,
            meeting=meeting,
            num_pages=num_pages,
            page_size=config.page_size,
            threads=threads_per_rank(config),
            attention=config.attention_wanted,
            longest=config.max_model_len,
            weight_file=config.weight_file,
            log_level=config.log_level,
            log_format=config.log_format,
        )

    def text(self) -> str:
        """As it crosses."""
        return dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> FollowerOptions:
        """Inverse of ``text``. Raises ValueError and TypeError for another text."""
        return cls(**loads(text))


def threads_per_rank(config: NodeConfig) -> int:
    """Cores that each rank computes on."""
    return max(1, config.threads // config.tp)
