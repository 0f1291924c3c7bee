"""A trained head in the format others read, with a card that says how it came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass(frozen=True)
class Seen:
    """What a head was trained on."""

    corpus: Mapping[str, int]  # training samples by file
    held_out: int  # samples
    shares: Mapping[str, float] = field(default_factory=dict)  # part used, 0 to 1, by source
    prompts: bool = False  # the prompts' tokens too


def write_card(folder: Path, name: str, target: str, seen: Seen, progress: Progress) -> None:
    """README.md of a head: target, data, how much it saw, how often it is right."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(card(name, target, seen, progress), encoding="utf-8")


def card(name: str, target: str, seen: Seen, progress: Progress) -> str:
    """The text of ``write_card``."""
    last = progress.history[-1]
    accepted = last["accepted_per_position"]
    shares = [f"- {100 * part:g} % of the samples from `{source}` were used." for source, part in seen.shares.items()]
    read = "prompts and answers" if seen.prompts else "answers"
    lines = [
        f"# {name} heads for {target}",
        "",
        f"`paceline train-drafter {name}` made these heads from the target's own answers. The files are in the public",
        "format, bf16 safetensors.",
        "",
        *(f"- Corpus: {samples:,} training samples of `{file}`." for file, samples in seen.corpus.items()),
        *shares,
        f"- Trained on {read}; {seen.held_out:,} samples were held out.",
        f"- Seen: {progress.tokens:,} tokens in {progress.step:,} steps and {progress.seconds / 60:.0f} minutes.",
        f"- Tokens a round on held-out greedy answers: {last['acceptance_length']:.3f}, with the bonus token counted",
        "  and every position as the start of a chain.",
        "",
        _row("position", [str(i + 1) for i in range(len(accepted))]),
        "|" + "---|" * (len(accepted) + 1),
        _row("accepted, given that all before were", [f"{share:.3f}" for share in accepted]),
        "",
        "Licence: Apache-2.0, as the target's.",
        "",
    ]
    return "\n".join(lines)


def _row(title: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([title, *cells])} |"
