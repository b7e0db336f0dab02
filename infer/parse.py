"""From arguments to a command's flags, and from a mistake in them to one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from typing import Any

import tyro

from dflash_jax.config import ConfigError
from dflash_jax.shortnames import nearest
from infer.options import COMMANDS

PROGRAM = "python -m infer"


def parse(arguments: list[str]) -> Any:
    """The flags of a command (a class of infer/options.py). Raises ConfigError for what is missing,
    unknown or of the wrong type; prints help and exits with status 0 when asked to."""
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help", "help"):
        print(overview())
        raise SystemExit(0)
    if name not in COMMANDS:
        said = f"'{name}' is not a command{nearest(name, COMMANDS)}" if name else "a command is missing"
        raise ConfigError(f"{said}: {PROGRAM} {{{','.join(COMMANDS)}}}, or --help")
    kind, program, shown = COMMANDS[name], f"{PROGRAM} {name}", io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            # DisallowNone: `--prompt None` is a prompt of four letters
            config = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
            return tyro.cli(kind, prog=program, args=arguments[1:], config=config)
    except SystemExit as exit:
        if not exit.code:
            raise
        said = first_sentence(shown.getvalue())
        flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(kind)]
        unknown = [word for word in re.findall(r"--[\w-]+", said) if word not in flags]
        hint = nearest(unknown[0], flags) if unknown else ""
        raise ConfigError(f"{said}{hint} (flags: {program} --help)") from None


def overview() -> str:
    """What `python -m infer --help` prints: the commands with their examples."""
    lines = ["DFlash speculative decoding: a draft proposes blocks of tokens, the target verifies them.", ""]
    lines += [f"usage: {PROGRAM} COMMAND [flags]", ""]
    for name, kind in COMMANDS.items():
        what, *rest = (kind.__doc__ or "").splitlines()
        lines.append(f"  {name:10}{what}")
        lines += [f"      {line.strip()}" for line in rest if PROGRAM in line]
        lines.append("")
    return "\n".join([*lines, f"All flags of a command: {PROGRAM} COMMAND --help"])


def first_sentence(box: str) -> str:
    """What tyro's error box says before its first rule, without frame and title."""
    framed = "╭" in box  # else drawn in ASCII, with the title in a part of its own
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│ ")
        if re.fullmatch("[─-]{3,}", text):
            parts.append([])
        elif text and text[0] not in "╭╰":
            parts[-1].append(text)
    said = [" ".join(part) for part in parts if part]
    first = said[:1] if framed else said[1:2] or said[:1]
    return (first[0] if first else "the flags cannot be read").rstrip(".")
