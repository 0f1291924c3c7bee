"""Drafter weights for the real model: shipped ones where there are, else heads that were never trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file

from draft_training.export import write_head
from draft_training.start import HeadOptions, Source, build_head
from paceline.spec_decode.heads.shipped import shipped_heads


class Weights:
    """Folders of heads for the real model, written when asked for: those that ship with Paceline, else untrained ones
    that start from the target's last layer; the draft model is the target without its middle layers."""

    UNTRAINED: Mapping[str, HeadOptions] = {
        "eagle": HeadOptions("eagle1", 1, 256),
        "eagle3": HeadOptions("eagle3", 1, 256),
        "mtp": HeadOptions("mtp", 1),
        "mtp x3": HeadOptions("mtp", 3, chained=True),
        "medusa": HeadOptions("medusa", 4),
    }
    VOCAB_STEP = 8  # EAGLE-3 drafts every eighth token
    AUX_LAYERS = (2, 15, 27)
    LEFT_OUT = range(8, 20)

    def __init__(self, target: Path, scratch: Path) -> None:
        self.target, self.scratch = target, scratch

    def folder(self, name: str) -> Path:
        """The folder to give as drafter_path."""
        found = shipped_heads(str(self.target), name)
        folder = found or self.scratch / name.replace(" ", "_")
        if not folder.exists():
            self._write_model(folder) if name == "draft_model" else self._write_head(folder, self.UNTRAINED[name])
        return folder

    def _write_head(self, folder: Path, options: HeadOptions) -> None:
        source = Source.from_folder(self.target)
        ids = tuple(range(0, source.spec.vocab_size, self.VOCAB_STEP))
        shape = source.shape(options.intermediate_size)
        write_head(folder, build_head(source, options, ids), source, shape, ids, self.AUX_LAYERS)

    def _write_model(self, folder: Path) -> None:
        weights = load_file(self.target / "model.safetensors")
        config = json.loads((self.target / "config.json").read_text())
        kept = [i for i in range(config["num_hidden_layers"]) if i not in self.LEFT_OUT]
        tensors = {name: value for name, value in weights.items() if not name.startswith("model.layers.")}
        for new, old in enumerate(kept):
            prefix = f"model.layers.{old}."
            tensors |= {f"model.layers.{new}.{n.removeprefix(prefix)}": weights[n] for n in weights if prefix in n}
        folder.mkdir(parents=True)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(kept)}))
