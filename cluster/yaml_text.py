"""YAML that people write: a key that is there twice is an error, where YAML would take the last and drop the first."""

from __future__ import annotations

from typing import Any

import yaml


def parse_yaml(text: str) -> Any:
    """What ``text`` holds. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """See yaml.SafeLoader. Keys that are merged in may be there twice: the mapping's own count."""
        node = super().compose_mapping_node(anchor)
        found: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # what it is for SafeLoader to refuse
            if key.value in found:
                raise yaml.composer.ComposerError(None, None, f"{key.value!r} is there twice", key.start_mark)
            found.add(key.value)
        return node
