"""What the two programs (`python -m train`, `python -m infer`) share: exit status 0, 2 for bad input, 1 for a
failure, 130 when interrupted; every error one sentence on stderr, never a traceback unless asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import tyro

from dflash_jax.config import ConfigError
from dflash_jax.tables import nearest

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130

T = TypeVar("T")


def guarded(run: Callable[[list[str]], int], arguments: list[str] | None = None) -> int:
    """The exit status of a program; what it raises becomes one sentence."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return run(arguments)
    except ConfigError as error:
        return _fail(error, BAD_INPUT, arguments)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        sys.stdout = None  # its flush at exit would fail again
        return FAILURE
    except Exception as error:  # a failed download, a full disk, no memory on the device
        return _fail(error, FAILURE, arguments)


def _fail(error: Exception, status: int, arguments: list[str]) -> int:
    if "--debug" in arguments:
        import traceback

        traceback.print_exception(error)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Our own errors are sentences; of others, the class tells as much as the text.
    ours = status == BAD_INPUT or type(error).__module__.startswith(("dflash_jax", "train"))
    sentence = lines[0] if ours else f"{type(error).__name__}: {lines[0]} (--debug shows where)"
    print(f"error: {sentence}", file=sys.stderr)
    return status


def command(name: str, commands: Mapping[str, Any], program: str, overview: Callable[[], str]) -> Any:
    """The entry of `commands`; ConfigError with the nearest name, or the overview and exit status 0."""
    if name in ("-h", "--help", "help"):
        print(overview())
        raise SystemExit(0)
    if name not in commands:
        said = f"'{name}' is not a command{nearest(name, commands)}" if name else "a command is missing"
        raise ConfigError(f"{said}: {program} {{{','.join(commands)}}}, or --help")
    return commands[name]


def flags(kind: type[T], program: str, arguments: list[str], default: T | None = None) -> T:
    """A dataclass filled from flags. ConfigError for what is missing, unknown or of the wrong type; prints
    help and exits with status 0 when asked to."""
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            # DisallowNone: `--prompt None` is a prompt of four letters
            config = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
            if default is None:
                return tyro.cli(kind, prog=program, args=arguments, config=config)
            return tyro.cli(kind, prog=program, args=arguments, config=config, default=default)
    except SystemExit as exit:
        if not exit.code:
            raise
        # tyro's words around what a settings class itself refused
        said = re.sub(r"^Error parsing ([\w.-]+): ", r"\1: ", first_sentence(shown.getvalue()))
        known = list(_names(kind if default is None else default))
        unknown = [word for word in re.findall(r"--[\w.-]+", said) if word not in known]
        hint = nearest(unknown[0], known) if unknown else ""
        raise ConfigError(f"{said}{hint} (flags: {program} --help)") from None


def _names(kind: Any, prefix: str = "--") -> list[str]:
    """Flags of a dataclass; of an instance also those of the dataclasses in it."""
    names = []
    for field in dataclasses.fields(kind):
        name = prefix + field.name.replace("_", "-")
        value = None if isinstance(kind, type) else getattr(kind, field.name)
        names += _names(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
    return names


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
