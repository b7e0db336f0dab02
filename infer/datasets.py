"""Prompts from a JSONL file: `{"turns": ["user turn", ...]}` or `{"prompt": "..."}` a line."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_jax.config import ConfigError


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """The first user turn of each line, at most `limit`, spread evenly over the file."""
    name = Path(path)
    try:
        lines = [line for line in name.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: the prompts cannot be read ({error})") from None
    if not lines:
        raise ConfigError(f"{name}: the file has no lines")
    count = len(lines) if limit is None else min(limit, len(lines))
    return [_prompt(name, i, lines[i]) for i in (k * len(lines) // count for k in range(count))]


def _prompt(name: Path, index: int, line: str) -> str:
    try:
        value = json.loads(line)
        turns = value["turns"] if "turns" in value else [value["prompt"]]
        if isinstance(turns[0], str) and turns[0]:
            return turns[0]
    except (ValueError, KeyError, IndexError, TypeError):
        pass
    raise ConfigError(f'{name}: line {index + 1} has neither "turns": ["..."] nor "prompt": "..."')
