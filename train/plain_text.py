"""Plain text as conversations: the user gives a paragraph's beginning, the model goes on with it."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import numpy as np

from dflash_jax.config import ConfigError
from dflash_jax.weights.atomic import replacing
from train.conversations import Message, messages_of, objects

_OPENING = 24  # characters that the user gives at least; a paragraph has twice as many at least
_GAP = re.compile(r"\s+")

Messages = list[Message]


def library_sources() -> list[Path]:
    """The modules of the running Python's standard library (not its packages): 5 MB, the same for everybody
    with this version."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = sorted(folder.glob("*.py"))
    if not found:
        raise ConfigError(
            f"language_model.library: {folder} holds no sources: name files in language_model.text"
        )
    return found


def read(paths: Sequence[Path]) -> list[Messages]:
    """Conversations of plain text files and of JSONL with {"text": "..."} or {"messages": [...]} a line.
    ConfigError names the file (and line) that cannot be used."""
    made: list[Messages] = []
    for path in paths:
        if path.suffix == ".jsonl":
            for line in objects(path):
                made += paragraphs(line.text("text")) if "text" in line else [messages_of(line)]
        else:
            try:
                made += paragraphs(path.read_text("utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}: language_model.text cannot be read ({error})") from None
    if not made:
        raise ConfigError(
            f"language_model.text: {', '.join(map(str, paths))} hold no paragraph of {2 * _OPENING} characters"
        )
    return made


def paragraphs(text: str) -> list[Messages]:
    """The user's turn is a paragraph's beginning, up to the first gap after _OPENING characters; the answer is
    the rest. A paragraph that is too short is joined with the next."""
    made: list[tuple[str, str]] = []
    waiting = ""
    for part in re.split(r"\n\s*\n", text):
        waiting = f"{waiting}\n{dedent(part).strip()}".strip()
        gap = _GAP.search(waiting, _OPENING)
        if len(waiting) >= 2 * _OPENING and gap is not None:
            made.append((waiting[: gap.start()], waiting[gap.end() :]))
            waiting = ""
    return asked(made)


def asked(pairs: Sequence[tuple[str, str]]) -> list[Messages]:
    """Conversations of one question and one answer each."""
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in pairs
    ]


def split(texts: Sequence[Messages], prompts: int, seed: int) -> tuple[list[Messages], list[str]]:
    """Conversations to train on, and `prompts` different user turns that none of them begins with. ConfigError
    when that leaves none."""
    turns = [messages[0]["content"] for messages in texts]
    different = np.array(list(dict.fromkeys(turns)), object)
    kept = set(np.random.default_rng(seed).permutation(different)[:prompts].tolist())
    rest = [messages for messages, turn in zip(texts, turns, strict=True) if turn not in kept]
    if not rest:
        raise ConfigError(
            f"language_model.prompts is {prompts}, but the text has no more user turns: lower it"
        )
    return rest, sorted(kept)


def write_prompts(path: Path, turns: Sequence[str]) -> None:
    """A line {"prompt": "..."} for each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for turn in turns:
            file.write((json.dumps({"prompt": turn}, ensure_ascii=False) + "\n").encode())
