"""Hosts that are described, in a file or by this machine: what a placement is shown for where no Ray runs."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from cluster.nodes.bundles import CPU, GPU, Host
from cluster.yaml_text import parse_yaml
from paceline.errors import ConfigError

GIB = 2**30
MAX_HOSTS = 1024


class DescribedHost(BaseModel):
    """One host of a hosts file."""

    model_config = ConfigDict(extra="forbid")

    gpus: int = Field(default=0, ge=0, le=64)
    cpus: float = Field(default=1, gt=0, le=4096)
    gpu_memory_gib: float = Field(default=0, ge=0)  # of one GPU; 0: not known
    memory_gib: float = Field(default=0, ge=0)  # of the host; 0: not known
    resources: dict[str, float] = Field(default={}, max_length=64)  # custom ones of Ray

    def host(self, address: str) -> Host:
        """As Ray would see it."""
        found = {CPU: self.cpus, f"node:{address}": 1.0} | self.resources | ({GPU: self.gpus} if self.gpus else {})
        return Host(address, found, found, self.gpu_memory_gib, self.memory_gib)


_HOSTS = TypeAdapter(dict[str, DescribedHost])


def read_hosts(file: Path) -> list[Host]:
    """The hosts of a YAML file: address, then what the host has. Raises ConfigError naming what is wrong."""
    try:
        described = _HOSTS.validate_python(parse_yaml(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError("hosts", f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError("hosts", f"{file} cannot be read: {error}") from None
    if not 0 < len(described) <= MAX_HOSTS:
        raise ConfigError("hosts", f"{file} has {len(described)} hosts; from 1 to {MAX_HOSTS} can be placed on")
    return [host.host(str(address)) for address, host in described.items()]


def this_host() -> Host:
    """This machine, as a private Ray would have it."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory = min((torch.cuda.get_device_properties(i).total_memory for i in range(gpus)), default=0)
    own = psutil.virtual_memory().total / GIB
    described = DescribedHost(gpus=gpus, cpus=os.cpu_count() or 1, gpu_memory_gib=memory / GIB, memory_gib=own)
    return described.host("127.0.0.1")
