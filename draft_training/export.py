"""A trained head in the format others read, with a card that says how it came about."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draft_training.heads import Eagle1, Eagle3, Medusa, Mtp1, Mtp3, TrainableHead
from draft_training.layers import HeadShape
from draft_training.start import Source
from draft_training.train import Progress
from paceline.errors import ConfigError
from paceline.spec_decode.heads.formats.config import Eagle1Config, Eagle3Config, MedusaConfig, MtpConfig
from paceline.spec_decode.heads.formats.eagle import vocabulary_tensors
from paceline.spec_decode.heads.formats.layer import LayerShape
from paceline.spec_decode.heads.formats.write import write_eagle1, write_eagle3, write_medusa, write_mtp


def write_head(
    folder: Path,
    head: TrainableHead,
    source: Source,
    shape: HeadShape,
    token_ids: tuple[int, ...],
    aux_layers: tuple[int, ...],
) -> None:
    """Write ``head`` to ``folder`` in its public format (algorithms.md F). token_ids: EAGLE-3's draft vocabulary."""
    spec, tensors = source.spec, head.tensors()
    layer = LayerShape.of_target(spec, shape.intermediate_size)
    if isinstance(head, Eagle3):
        config = Eagle3Config(layer, spec.vocab_size, len(token_ids), spec.hidden_size, aux_layers)
        write_eagle3(folder, tensors | vocabulary_tensors(sorted(token_ids), spec.vocab_size), config)
    elif isinstance(head, Eagle1):
        write_eagle1(folder, tensors, Eagle1Config(layer, spec.vocab_size))
    elif isinstance(head, (Mtp1, Mtp3)):
        modules = head.num_steps if isinstance(head, Mtp3) else 1
        write_mtp(folder, tensors, MtpConfig(spec.hidden_size, spec.num_layers, modules, True, layer))
    elif isinstance(head, Medusa):
        write_medusa(folder, tensors, MedusaConfig(spec.hidden_size, head.num_steps, head.num_blocks))
    else:
        raise ConfigError("head", f"no public format for {type(head).__name__}")


def write_card(folder: Path, name: str, target: str, corpus: Mapping[str, Any], progress: Progress) -> None:
    """README.md of a head: target, data, how much it saw, how often it is right."""
    last = progress.history[-1]
    positions = " | ".join(f"{share:.3f}" for share in last["accepted_per_position"])
    numbers = " | ".join(str(i + 1) for i in range(len(last["accepted_per_position"])))
    rule = "---|" * len(last["accepted_per_position"])
    lines = [
        f"# {name} heads for {target}",
        "",
        "Made by `paceline train-drafter` on the target's own answers; bf16 safetensors in the public format.",
        "",
        f"- data: {json.dumps(dict(corpus))}",
        f"- seen: {progress.tokens:,} tokens in {progress.step:,} steps, {progress.seconds / 60:.0f} minutes",
        f"- held-out greedy answers: {last['acceptance_length']:.3f} tokens a round (the bonus counted) were every",
        "  position the start of a chain; accepted at each position, given that all before were:",
        "",
        f"| {numbers} |",
        f"|{rule}",
        f"| {positions} |",
        "",
        "Licence: Apache-2.0, as the target's.",
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
