"""Typed reading of a config file. Every error names the file and the field, and a missing value is an
error unless the caller gives a default: nothing is guessed here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dflash_jax.config import ConfigError

# Bounds far above any real model: they keep a damaged file from asking for a config of 2**31 layers.
MAX_LAYERS = 4096
MAX_INTEGER = 2**31 - 1
# Real config.json files are a few kB; an index of shards of the largest models is a few MB.
MAX_JSON_BYTES = 64 * 2**20

_REQUIRED: Any = object()
D = TypeVar("D")  # what the caller wants for an absent value, None for example


@contextlib.contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Put the file's name before errors of a config that was filled from it."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith(str(file)):
            raise
        raise ConfigError(f"{file}: {error}") from None


def file_bytes(path: Path) -> int:
    """Size of an existing, non-empty regular file."""
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder, not a file")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path}: cannot be read: check its permissions")
    size = path.stat().st_size
    if size == 0:
        raise ConfigError(f"{path}: the file is empty (0 bytes): fetch it again")
    return size


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    size = file_bytes(path)
    if size > MAX_JSON_BYTES:
        raise ConfigError(f"{path}: {size} bytes are too many for a JSON file (limit {MAX_JSON_BYTES})")
    return parse_json(path.read_bytes(), path)


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(data)
    # ValueError covers bad UTF-8, bad JSON and integers of thousands of digits
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a JSON {type(values).__name__}, not an object")
    return values


class Fields:
    """Values of one section of a config file. A value of null counts as absent."""

    def __init__(self, file: str | Path, values: Mapping[str, Any], section: str = "") -> None:
        self.file = str(file)
        self.values = values
        self.prefix = f"{section}." if section else ""

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, message: str) -> ConfigError:
        return ConfigError(f"{self.file}: {self.prefix}{key} {message}")

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(key, "is missing")
        return default

    def integer(self, key: str, default: D = _REQUIRED, most: int = MAX_INTEGER) -> int | D:
        """An integer of 0 to `most`."""
        value = self.get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {value!r}: it must be an integer")
        if not 0 <= value <= most:
            raise self.error(key, f"is {value}: it must be between 0 and {most}")
        return value

    def number(self, key: str, default: D = _REQUIRED) -> float | D:
        value = self.get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"is {value!r}: it must be a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise self.error(key, "must be a finite number")
        return value

    def flag(self, key: str, default: D = _REQUIRED) -> bool | D:
        value = self.get(key, default)
        if value is not default and not isinstance(value, bool):
            raise self.error(key, f"is {value!r}: it must be true or false")
        return value

    def text(self, key: str, default: D = _REQUIRED) -> str | D:
        value = self.get(key, default)
        if value is not default and not isinstance(value, str):
            raise self.error(key, f"is {value!r}: it must be a string")
        return value

    def integers(self, key: str, default: D = _REQUIRED) -> tuple[int, ...] | D:
        value = self.get(key, default)
        if value is default:
            return value
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.error(key, f"is {value!r}: it must be a list of integers")
        return tuple(value)

    def texts(self, key: str, default: D = _REQUIRED) -> tuple[str, ...] | D:
        value = self.get(key, default)
        if value is default:
            return value
        if not isinstance(value, list) or any(not isinstance(v, str) for v in value):
            raise self.error(key, f"is {value!r}: it must be a list of strings")
        return tuple(value)

    def section(self, key: str) -> Fields:
        """A nested object; an absent one is an empty section."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"is {value!r}: it must be an object")
        return Fields(self.file, value, self.prefix + key)
