"""The site's build fails on what would lead a reader nowhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = """\
# Index

```{toctree}
page
missing_page
```

[page](page.md), [heading](page.md#a-heading), [anchor](page.md#an-anchor), [both](page.md#a-heading-too),
[data](../data.json), [folder](../folder/), [readme](../README.md), [part](../README.md#a-part), [here](#index)

- [dead page](gone.md)
- [dead anchor](page.md#gone)
- [dead anchor here](#gone-here)
- [dead file](../gone.json)
- [dead folder](../gone/)
- [dead Markdown file](../GONE.md)
- [dead part](../README.md#gone-part)

![dead picture](../gone.png)
"""
PAGE = """\
# Page

## A heading

<a id="an-anchor"></a>
A paragraph; [up](#an-anchor).

<a id="a-heading-too"></a>
## A heading too

<a id="twice"></a> one
<a id="twice"></a> two
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """Exit status, warnings and output folder of a site with one fault of every kind, under the site's own settings."""
    folder = tmp_path_factory.mktemp("site")
    pages = folder / "docs"
    (folder / "folder").mkdir()
    pages.mkdir()
    (folder / "data.json").write_text("{}")
    (folder / "README.md").write_text("# Readme\n\n## A part\n")
    (pages / "index.md").write_text(INDEX)
    (pages / "page.md").write_text(PAGE)
    (pages / "orphan.md").write_text("# Nobody lists this\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-D", "html_theme=basic"]
    command += ["-c", str(ROOT / "docs"), str(pages), str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr, folder / "out"


FAULTS = {
    "a page that is not there": r"toctree contains reference to nonexisting document 'missing_page'",
    "a page in no toctree": r"orphan\.md: WARNING: document isn't included in any toctree",
    "dead page": r"index\.md:\d+: WARNING: 'myst' cross-reference target not found: 'gone\.md'",
    "dead anchor": r"index\.md:\d+: WARNING: local id not found in doc 'page': 'gone'",
    "dead anchor here": r"index\.md:\d+: WARNING: 'myst' cross-reference target not found: 'gone-here'",
    "dead file": r"index\.md:\d+: WARNING: 'myst' cross-reference target not found: '\.\./gone\.json'",
    "dead folder": r"index\.md:\d+: WARNING: 'myst' cross-reference target not found: '\.\./gone/'",
    "dead Markdown file": r"index\.md:\d+: WARNING: 'myst' cross-reference target not found: '\.\./GONE\.md'",
    "dead part": r"index\.md:\d+: WARNING: \S*README\S* has no anchor 'gone-part'",
    "dead picture": r"index\.md:\d+: WARNING: image file not readable: \.\./gone\.png",
    "an anchor twice": r"page\.md:\d+: WARNING: the anchor 'twice' is on this page twice",
}


@pytest.mark.parametrize("warning", FAULTS.values(), ids=FAULTS)
def test_the_build_reports(build: tuple[int, str, Path], warning: str) -> None:
    assert re.search(warning, build[1]), build[1]


def test_the_build_reports_nothing_else_and_fails(build: tuple[int, str, Path]) -> None:
    status, told, _ = build
    assert status == 1
    warnings = [line for line in told.splitlines() if "WARNING" in line]
    assert len(warnings) == len(FAULTS), told


def test_good_links_lead_somewhere(build: tuple[int, str, Path]) -> None:
    out = build[2]
    index, page = (out / "index.html").read_text(), (out / "page.html").read_text()
    for anchor in ("a-heading", "an-anchor", "a-heading-too"):
        assert f'href="page.html#{anchor}"' in index
        assert page.count(f'id="{anchor}"') == 1
    assert 'href="#an-anchor"' in page
    [data] = re.findall(r'href="(_downloads/[^"]+/data\.json)"', index)
    assert (out / data).is_file()
    for text in ("folder", "readme", "part"):
        assert f">{text}</span>" in index
