"""What made a file of conversations, in a file beside it: NAME.origin.json for NAME.jsonl.

A line says how it was drawn, but not by whom: a file that is continued with another target, or with other
sampling, would be a mixture that looks like either.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.config import ConfigError
from dflash_jax.weights.atomic import replacing
from dflash_jax.weights.fields import read_json

_log = logging.getLogger(__name__)


def keep(path: Path, wanted: Mapping[str, Any]) -> None:
    """Before `path` is continued: ConfigError that names the first field in which what made it differs from
    `wanted` (values of JSON). Written where the file is new; a file that somebody else brought is continued, with
    a warning."""
    beside = path.with_suffix(".origin.json")
    wanted = json.loads(json.dumps(wanted))
    if not path.is_file() or not path.stat().st_size:
        with replacing(beside) as file:
            file.write((json.dumps(wanted, indent=1) + "\n").encode())
        return
    if not beside.is_file():
        _log.warning("%s: what made the conversations in it is not known: they are kept", path)
        return
    there = read_json(beside)
    for name, value in wanted.items():
        if there.get(name) != value:
            raise ConfigError(
                f"{path}: was made with {name} {_short(there.get(name))}, but this run has {_short(value)}: restore "
                "the old value, or name another file with `out`"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
