"""A tiny checkpoint that nodes of one, two and four ranks can serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.models.config import ModelSpec
from tests.multihost.small_model import SPEC, write_model

RANKED_SPEC: ModelSpec = replace(SPEC, hidden_size=128, intermediate_size=256, head_dim=32, num_layers=4)


def write_ranked_model(folder: Path) -> Path:
    """The folder, as a hub has it."""
    return write_model(folder, RANKED_SPEC)
