"""docs/extend/model.md, followed: its file and its record are installed, then its own tests run."""

from __future__ import annotations

import pytest

from paceline.models.decoder import DecoderModel
from paceline.models.families import FAMILIES, Family
from paceline.models.registry import model_class
from tests.support.needs import needs_kernels
from tests.support.recipes import collected, install, load, record_of

PAGE = "model.md"
ARCHITECTURES = tuple(FAMILIES)

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def followed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PAGE, "paceline/models/gated.py")
    for architecture, record in record_of(PAGE, "paceline/models/families.py", Family=Family).items():
        monkeypatch.setitem(FAMILIES, architecture, record)


globals().update(collected(load(PAGE, "tests/models/test_gated.py")))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_record_names_a_class(architecture: str) -> None:
    found = model_class(FAMILIES[architecture].name)
    assert isinstance(found, type)
    assert issubclass(found, DecoderModel)
