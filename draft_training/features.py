"""The target's hidden rows over a corpus, computed once by the serving engine and kept on disk.

A shard is a safetensors file of some hundred samples: ``features`` bf16 [rows, (len(aux_layers) + 1) * hidden_size],
per row the residual stream entering each auxiliary layer, then the hidden row after the final norm; ``token_ids``
int32 [rows]; ``starts`` int64 [samples + 1], first row of each sample; ``answers`` int64 [samples], its prompt length.
Whole shards appear at once (written aside, then renamed), so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draft_training.corpus import Sample
from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.select import attention_for
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.base import AuxCapture, ForwardContext, TargetModel

SHARD_SAMPLES = 128
ROWS_PER_FORWARD = 1536
PAGE = 64


@dataclass(frozen=True)
class SampleRows:
    """One sample's rows. n tokens."""

    token_ids: torch.Tensor  # int64 [n]
    prompt_len: int
    features: torch.Tensor  # [n, (aux + 1) * hidden_size]


class FeatureMaker:
    """Runs the target over samples, several at a time."""

    def __init__(self, model: TargetModel, aux_layers: tuple[int, ...], max_tokens: int) -> None:
        self.model, self.aux_layers = model, aux_layers
        rows = ROWS_PER_FORWARD + max_tokens
        pages = -(-rows // PAGE)
        self.kv = KvPool(KvLayout(model.kv_layers, model.dtype), pages, PAGE, model.device)
        spec = model.spec
        special = spec.special_attention(spec.max_model_len)
        geometry = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention = attention_for(model.device, *geometry, special=special, longest=spec.max_model_len)

    def rows(self, samples: Sequence[Sample]) -> Iterator[SampleRows]:
        """Rows of each sample, in order."""
        group: list[Sample] = []
        size = 0
        for sample in samples:
            if group and size + len(sample.token_ids) > ROWS_PER_FORWARD:
                yield from self._forward(group)
                group, size = [], 0
            group.append(sample)
            size += len(sample.token_ids)
        if group:
            yield from self._forward(group)

    def _forward(self, group: Sequence[Sample]) -> list[SampleRows]:
        segments, at = [], 0
        for sample in group:
            n = len(sample.token_ids)
            segments.append(Segment.linear(sample.token_ids, 0, torch.arange(at, at + n, dtype=torch.int32)))
            at += n
        batch = ForwardBatch.build(segments, self.model.device)
        aux = AuxCapture(self.aux_layers)
        final = self.model.forward(ForwardContext.build(batch, self.kv, self.attention), aux)
        rows = torch.cat((aux.rows(), final), dim=-1)
        parts = torch.split_with_sizes(rows, [len(s.token_ids) for s in group])
        return [
            SampleRows(torch.tensor(sample.token_ids), len(sample.prompt_ids), part)
            for sample, part in zip(group, parts, strict=True)
        ]


class FeatureStore:
    """Shards of one list of samples below one folder."""

    def __init__(self, folder: Path, samples: Sequence[Sample], identity: str) -> None:
        """identity: whatever else the rows depend on (weights, auxiliary layers); part of the folder's name."""
        digest = hashlib.blake2b(identity.encode(), digest_size=8)
        for sample in samples:
            digest.update(json.dumps(sample.token_ids).encode())
        self.folder = folder / digest.hexdigest()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.samples = samples
        self.num_shards = -(-len(samples) // SHARD_SAMPLES)

    def path(self, shard: int) -> Path:
        """File of a shard."""
        return self.folder / f"{shard:05d}.safetensors"

    def of_shard(self, shard: int) -> Sequence[Sample]:
        """Its samples, in order."""
        return self.samples[shard * SHARD_SAMPLES : (shard + 1) * SHARD_SAMPLES]

    def make(self, shard: int, maker: FeatureMaker) -> int:
        """Compute one shard; returns its number of rows."""
        rows = list(maker.rows(self.of_shard(shard)))
        lengths = torch.tensor([0, *(len(r.token_ids) for r in rows)])
        tensors = {
            "features": torch.cat([r.features for r in rows]).to("cpu", torch.bfloat16).contiguous(),
            "token_ids": torch.cat([r.token_ids for r in rows]).to(torch.int32),
            "starts": lengths.cumsum(0),
            "answers": torch.tensor([r.prompt_len for r in rows]),
        }
        aside = self.path(shard).with_suffix(".part")
        save_file(tensors, aside)
        aside.rename(self.path(shard))
        return int(lengths.sum())

    def read(self, shard: int) -> list[SampleRows]:
        """All samples of a shard."""
        with safe_open(self.path(shard), framework="pt") as file:
            features, token_ids, starts, answers = (
                file.get_tensor(name) for name in ("features", "token_ids", "starts", "answers")
            )
        bounds = starts.tolist()
        return [
            SampleRows(token_ids[a:b].long(), int(prompt), features[a:b])
            for a, b, prompt in zip(bounds, bounds[1:], answers, strict=False)
        ]
