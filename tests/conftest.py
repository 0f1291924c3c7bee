"""Shared fixtures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real model's folder, fetched and converted at the first use."""
    from paceline.models.hub import resolve_model

    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(autouse=True)
def one_thread_one_seed() -> None:
    """Every test starts alike. Tests of the parts that need no torch must not load it for this."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
