"""Fields of a GGUF file that belong to its architecture, each checked before it is believed."""

from __future__ import annotations

from typing import Any

from paceline.errors import ConfigError
from paceline.models.gguf.file import GgufFile
from paceline.models.moe_config import MAX_EXPERTS

# Architectures whose files may have MTP modules: layers after the last, which stay there.
WITH_MODULES = ("glm4moe", "deepseek2")


class Fields:
    """Fields of one architecture, named from ``architecture.`` on."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._fields = file, file.fields
        self.architecture = str(self._fields.get("general.architecture"))

    def refused(self, message: str) -> ConfigError:
        """An error about this file."""
        return ConfigError("model", f"{self._file.path.name}: {message}")

    def number(self, name: str, default: float | None = None) -> float:
        """A number of the architecture. Raises ConfigError where there is none, or it is below 0."""
        value = self._fields.get(f"{self.architecture}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 40:
            raise self.refused(f"{self.architecture}.{name} is {value!r}, expected a number")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """The same of a whole number above 0."""
        value = self.number(name, default)
        if not isinstance(value, int) or value < 1:
            raise self.refused(f"{self.architecture}.{name} is {value!r}, expected a whole number above 0")
        return value

    def count(self, name: str) -> int:
        """A whole number; 0 where the file does not say."""
        value = self.number(name, 0)
        if not isinstance(value, int):
            raise self.refused(f"{self.architecture}.{name} is {value!r}, expected a whole number")
        return value

    def get(self, name: str) -> Any:
        """A field of the architecture; None where it has none."""
        return self._fields.get(f"{self.architecture}.{name}")

    def num_layers(self) -> int:
        """Layers of the model. Raises ConfigError where MTP modules leave none."""
        blocks, modules = self.whole("block_count"), self._num_modules()
        if modules >= blocks:
            raise self.refused(f"{self.architecture}.nextn_predict_layers is {modules} of {blocks} blocks")
        return blocks - modules

    def is_module(self, layer: int) -> bool:
        """Whether a layer, by its number, is an MTP module."""
        return self._num_modules() > 0 and self.num_layers() <= layer < self.whole("block_count")

    def _num_modules(self) -> int:
        return self.count("nextn_predict_layers") if self.architecture in WITH_MODULES else 0

    def expert_count(self) -> int:
        """Experts of each layer. Raises ConfigError for fewer than 2, or more than MAX_EXPERTS."""
        count = self.whole("expert_count")
        if not 2 <= count <= MAX_EXPERTS:
            raise self.refused(f"{self.architecture}.expert_count is {count}, expected 2 to {MAX_EXPERTS}")
        return count

    def token(self, name: str) -> int | None:
        """The id of a special token."""
        value = self._fields.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None

    def common(self, name: str) -> Any:
        """A field that belongs to no architecture, by its whole name; None where there is none."""
        return self._fields.get(name)
