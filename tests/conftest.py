"""Shared fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real model's folder, fetched and converted at the first use."""
    from paceline.models.hub import resolve_model

    return resolve_model("smollm2-135m-instruct")
