"""TOML tables read strictly into dataclasses: an unknown key, a wrong type and a missing value are errors, so
that a misspelt setting is never a silent default."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from dflash_jax.config import ConfigError

T = TypeVar("T")


def read(path: Path) -> dict[str, Any]:
    """A TOML file. ConfigError when it is none."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def section(kind: type[T], values: Any, path: Path, name: str) -> T:
    """A dataclass filled from a table of the file `path`; the types of its fields decide what is accepted:
    numbers, strings, booleans, Path (from a string), tuple[x, ...] (from a list), Literal, and | None."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: {name} is {values!r}: it must be a table, [{name}]")
    accepted = typing.get_type_hints(kind)
    refuse_unknown(path, f"{name}.", values, accepted)
    given = {}
    for key, value in values.items():
        found = [made for option in _options(accepted[key]) for made in _fitting(value, option)]
        if not found:
            wanted = " or ".join(_describe(option) for option in _options(accepted[key]))
            raise ConfigError(f"{path}: {name}.{key} is {value!r}: it must be {wanted}")
        given[key] = found[0]
    missing = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise ConfigError(f"{path}: {name}.{missing[0]} is missing")
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{path}: {name}: {error}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` when a known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def refuse_unknown(path: Path, prefix: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in values:
        if key not in known:
            raise ConfigError(
                f"{path}: {prefix}{key} is not a setting{nearest(key, known)}; known are {', '.join(known)}"
            )


def _options(hint: Any) -> list[Any]:
    """The types that a field takes: int | None -> [int]."""
    # Literal["a"] | None is a typing.Union, int | None a types.UnionType
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if union else (hint,)
    return [part for part in parts if part is not type(None)]


def _fitting(value: Any, option: Any) -> list[Any]:
    """[value, as this type], or [] where it is of another."""
    if typing.get_origin(option) is tuple:
        if not isinstance(value, list):
            return []
        items = [_fitting(item, typing.get_args(option)[0]) for item in value]
        return [tuple(item[0] for item in items)] if all(items) else []
    if typing.get_origin(option) is Literal:
        return [value] if value in typing.get_args(option) else []
    if option is Path and isinstance(value, str):
        return [Path(value)]
    if option is float and isinstance(value, int) and not isinstance(value, bool):
        return [float(value)]
    return [value] if type(value) is option else []


def _describe(option: Any) -> str:
    if typing.get_origin(option) is tuple:
        return f"a list of {_describe(typing.get_args(option)[0])}"
    if typing.get_origin(option) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(option))
    return "str" if option is Path else str(option.__name__)
