"""The formats by name, and which of them a chat template teaches."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.parsing.formats.base import ToolFormat
from paceline.parsing.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from paceline.parsing.formats.glm45 import GLM45
from paceline.parsing.formats.hermes import HERMES
from paceline.parsing.formats.llama3_json import LLAMA3_JSON
from paceline.parsing.formats.mistral import MISTRAL
from paceline.parsing.formats.qwen3_coder import QWEN3_CODER
from paceline.parsing.reasoning import MISTRAL_THINK, THINK, ReasoningFormat

# The more particular first: `detect_tool_calls` takes the first whose marks a template has.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    form.name: form for form in (GLM45, QWEN3_CODER, DEEPSEEK_V3, DEEPSEEK_V31, MISTRAL, HERMES, LLAMA3_JSON)
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {form.name: form for form in (MISTRAL_THINK, THINK)}


def detect_tool_calls(template: str) -> str:
    """The format that a template with tools teaches; empty when it is none that is known."""
    for name, form in TOOL_FORMATS.items():
        if all(mark in template for mark in form.in_template):
            return name
    return ""


def detect_reasoning(template: str) -> str:
    """The form of the reasoning that a template knows; empty when it knows none."""
    for name, form in REASONING_FORMATS.items():
        if all(mark in template for mark in form.in_template):
            return name
    return ""
