"""Checked links for Markdown that is read on GitHub and on the site.

- ``<a id="name"></a>`` becomes a target, so that ``page.md#name`` is checked like a heading's anchor.
- A link to a file of the repository outside ``docs/`` must name one that exists. Files become downloads; folders and
  Markdown files, which are no pages of the site, become plain text.

Both run before MyST resolves references, whose own warnings (errors under ``-W``) report what is left.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from docutils.transforms import Transform
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

log = logging.getLogger(__name__)

ANCHOR = re.compile(r'<a id="([^"]+)">(?:\s*</a>)?')
BEFORE_REFERENCES = 800  # MyST resolves "#name" at 879; docutils has given every id by 700


class AnchorTargets(Transform):
    """Makes targets of ``<a id="name"></a>``. A name that the page has already is an error."""

    default_priority = BEFORE_REFERENCES

    def apply(self, **_: Any) -> None:
        """Replace the raw nodes, and tell MyST the names as it knows headings: to this page and to all others."""
        env: BuildEnvironment = self.document.settings.env
        slugs: dict[str, tuple[int | None, str, str]] = getattr(self.document, "myst_slugs", {})
        seen: set[str] = set()
        for raw in list(self.document.findall(nodes.raw)):
            found = ANCHOR.fullmatch(raw.astext().strip())
            if found is None:
                continue
            name = found[1]
            if name in seen:
                log.warning("the anchor %r is on this page twice", name, location=raw)
            seen.add(name)
            _drop_end(raw)
            if name in self.document.ids:  # of the heading below the anchor, which has the same name
                raw.parent.remove(raw)
                continue
            target = self.document.ids[name] = nodes.inline("", "", ids=[name])
            raw.replace_self(target)
            slugs[name] = (raw.line, name, "")
        env.metadata[env.docname]["myst_slugs"] = slugs


def _drop_end(raw: nodes.raw) -> None:
    """The ``</a>`` of ``raw``, a node of its own inside a paragraph."""
    following = raw.next_node(descend=False, siblings=True)
    if isinstance(following, nodes.raw) and following.astext().strip() == "</a>":
        following.parent.remove(following)


class RepositoryLinks(Transform):
    """Resolves links to folders, and to Markdown files outside the site. MyST makes downloads of other files."""

    default_priority = BEFORE_REFERENCES

    def apply(self, **_: Any) -> None:
        """Replace every link whose path leads out of the site by its text, when the path and the anchor exist."""
        env: BuildEnvironment = self.document.settings.env
        folder = Path(env.doc2path(env.docname)).parent
        for link in list(self.document.findall(addnodes.pending_xref)):
            if link.get("reftype") != "myst":
                continue
            target, _, anchor = link["reftarget"].partition("#")
            path = folder / unquote(target)
            if link.get("refdomain") == "doc":
                if target in env.found_docs:
                    continue
                path, anchor = Path(env.srcdir, f"{target}.md"), str(link.get("reftargetid") or "")
            if not target or not path.exists() or (path.is_dir() and anchor):
                continue  # MyST reports it
            if anchor and anchor not in anchors_of(path):
                log.warning(
                    "%s has no anchor %r", path.name, anchor, location=link, type="myst", subtype="xref_missing"
                )
            text = nodes.inline("", "", *link[0].children, classes=["repository-path"])
            link.replace_self(text)


def anchors_of(path: Path) -> set[str]:
    """The anchors of a Markdown file that is no page of the site: its headings' and its ``<a id>``."""
    text = path.read_text(encoding="utf-8")
    tokens = MarkdownIt().use(anchors_plugin, max_level=6).parse(text)
    headings = {str(token.attrGet("id")) for token in tokens if token.type == "heading_open"}
    return headings | set(re.findall(r'<a id="([^"]+)">', text))


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_transform(AnchorTargets)
    app.add_transform(RepositoryLinks)
    return {"version": "1", "parallel_read_safe": True}
