"""``python -m benchmarks.peers.wide_model FOLDER``: a model whose rows every type of GGUF file can hold.

The real model's rows of 576 are no multiple of the 256 weights that Q4_K takes together. This one has rows of 1,024 and
2,816, random weights, and the real model's tokenizer. Its text means nothing; it takes the time of a real one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from paceline.models.config import ModelSpec
from paceline.models.hub import resolve_model
from paceline.models.llama_shapes import model_shapes

TOKENIZER_OF = "smollm2-135m-instruct"
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
KV_HEADS = 4
SPREAD = 0.02  # standard deviation of the weights
SEED = 1024


def main() -> None:
    """Write the folder; one that is there already is left as it is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)


def write(folder: Path) -> None:
    """Tokenizer and config first, weights last."""
    if (folder / "model.safetensors").exists():
        return
    real = resolve_model(TOKENIZER_OF)
    folder.mkdir(parents=True, exist_ok=True)
    for file in real.glob("*.json"):
        if "safetensors" not in file.name:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((real / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SHAPE | {"num_key_value_heads": KV_HEADS}))
    generator, tensors = torch.Generator().manual_seed(SEED), {}
    for name, shape in model_shapes(ModelSpec.from_folder(folder)).items():
        values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * SPREAD
        tensors[name] = values.bfloat16()
    save_file(tensors, folder / "unfinished", {"format": "pt"})
    (folder / "unfinished").replace(folder / "model.safetensors")


if __name__ == "__main__":
    main()
