"""What options that have a fixed choice may be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from paceline.speculation import drafter_choices
from paceline.transports import TRANSPORTS


def _known_drafter(value: str) -> str:
    if value not in drafter_choices():
        raise ValueError(f"must be one of {', '.join(drafter_choices())}")
    return value


DrafterName = Annotated[str, AfterValidator(_known_drafter), Field(json_schema_extra={"enum": list(drafter_choices())})]


def _known_transport(value: str) -> str:
    if value not in TRANSPORTS:
        raise ValueError(f"must be one of {', '.join(TRANSPORTS)}")
    return value


TransportName = Annotated[str, AfterValidator(_known_transport), Field(json_schema_extra={"enum": list(TRANSPORTS)})]
DtypeName = Literal["bf16", "fp32"]
KvDtypeName = Literal["auto", "int8"]
QuantizeName = Literal["none", "w8a8", "w4a8", "w8a16", "w4a16"]
LogLevel = Literal["debug", "info", "warning", "error"]
ToolCallParser = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "glm45", "qwen3_coder"
]
ReasoningParser = Literal["auto", "none", "think", "mistral"]
LogFormat = Literal["text", "json"]
