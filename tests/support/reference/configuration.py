"""docs/configuration.md, from the options' descriptions."""

from __future__ import annotations

from itertools import groupby

from cluster.commands.options import Option, serve_options
from tests.support.reference.markdown import made_from, table

CONFIGURATION = """\
# Configuration

{made}

`paceline serve` and `paceline demo` take the same options from three places. Each place overrides those below it:

1. The command line: `--num-draft-tokens 8`, `--no-prefix-cache`.
2. Environment variables. The name is in capitals, after `PACELINE_`: `PACELINE_NUM_DRAFT_TOKENS=8`,
   `PACELINE_PREFIX_CACHE=false`.
3. A YAML file given as `--config FILE`. Names have underscores or dashes: `num_draft_tokens: 8`, `prefix_cache: false`.

Options are read once, at start. An unknown name or a wrong value in any place ends the command with an error that names
the option and the place. A file for two nodes of each kind looks like this:

```yaml
model: smollm2-135m-instruct
prefill_nodes: 2
decode_nodes: 2
kv_cache_tokens: 65536
http: 0.0.0.0:8000
api_keys: keys.yaml
```

Memory, batches, device and ranks may differ between the roles. An option of a section holds for the nodes of that role,
and the option outside of it for the others:

```yaml
tp: 2
kv_cache_tokens: 65536
prefill:
  tp: 4
  prefill_chunk_tokens: 2048
decode:
  max_running: 128
```

`--prefill-tp 4` and `PACELINE_PREFILL_TP=4` say the same.

Three further variables are no options. `PACELINE_API_KEY` is the key that clients send. `PACELINE_HOME` is the folder
that holds models and compiled CPU kernels, `~/.cache/paceline` unless given. `PACELINE_KERNELS`
chooses kernels for tests; CONTRIBUTING.md describes it.
"""


def configuration_page() -> str:
    """docs/configuration.md."""
    parts = [CONFIGURATION.format(made=made_from("paceline/engine_config.py, paceline/config.py"))]
    for group, options in groupby(serve_options(), key=lambda option: option.group):
        rows = [_option_row(option) for option in options]
        parts.append(f"## {group}\n\n{table(('option', 'default', 'values', 'description'), rows)}")
    return "\n".join(parts)


def _option_row(option: Option) -> tuple[str, ...]:
    flag = f"`{option.flag.partition('/')[0]}`"
    default = option.default if option.default == "empty" else f"`{option.default}`"
    values = option.values or {int: "whole number", float: "number", bool: "true, false"}.get(option.kind, "text")
    return flag, default, values, option.description
