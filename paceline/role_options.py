"""What nodes of one role may have in place of the deployment's options."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from paceline.option_values import DtypeName

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
CAST = ("fp32", "bf16")  # dtypes of prefill and decode nodes whose rows can be rounded on their way


class RoleOptions(BaseModel):
    """Values for the nodes of one role. Each option has the name, the meaning and the range of the deployment's; None,
    or 0 ranks or pools, takes that one's value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str | None = None
    tp: int | None = None
    attention_dp: int | None = None
    threads_per_node: int | None = None
    dtype: DtypeName | None = None
    attention: Literal["auto", "flashinfer", "triton", "torch"] | None = None
    cuda_graphs: bool | None = None
    graph_memory_mib: int | None = None
    page_size: int | None = None
    kv_cache_tokens: int | None = None
    prefill_chunk_tokens: int | None = None
    max_running: int | None = None
    max_waiting: int | None = None

    @field_validator("tp", "attention_dp")
    @classmethod
    def _as_the_deployment(cls, value: int | None) -> int | None:
        return value or None

    def given(self) -> dict[str, Any]:
        """The values that are not the deployment's, by option."""
        return self.model_dump(exclude_none=True)


def role_option(name: str) -> tuple[Role, str] | None:
    """Role and option of a name such as ``prefill_tp`` or ``decode_prefill_chunk_tokens``; None for another name."""
    for role in ROLES:
        option = name.removeprefix(f"{role}_")
        if option != name and option in RoleOptions.model_fields:
            return role, option
    return None


def kind_of(device: str) -> str:
    """``cpu`` or ``cuda``, without the number of a device."""
    return device.partition(":")[0]
