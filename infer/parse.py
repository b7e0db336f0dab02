"""From arguments to a command's flags, and from a mistake in them to one sentence."""

from __future__ import annotations

from typing import Any

from dflash_jax import command_line
from infer.options import COMMANDS

PROGRAM = "python -m infer"


def parse(arguments: list[str]) -> Any:
    """The flags of a command (a class of infer/options.py). Raises ConfigError for what is missing,
    unknown or of the wrong type; prints help and exits with status 0 when asked to."""
    name = arguments[0] if arguments else ""
    kind = command_line.command(name, COMMANDS, PROGRAM, overview)
    return command_line.flags(kind, f"{PROGRAM} {name}", arguments[1:])


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
