"""The GGUF container: header, metadata, tensor table. Bounds are checked before anything is read or
allocated, so a damaged file gives one sentence instead of a crash.

Why not gguf-py's GGUFReader: it allocates from unchecked counts, and it keeps every element of every
array as its own numpy object, which takes 3.3 s for SmolLM2's vocabulary; this reader takes 0.07 s. The
quantised blocks are decoded by gguf-py.

Layout (ggml docs/gguf.md): "GGUF", u32 version, u64 tensor count, u64 metadata count; metadata: string
key, u32 type, value; tensors: string name, u32 axes, u64 sizes (innermost first), u32 type, u64 offset;
padding to `general.alignment`; data. A string is u64 length + UTF-8.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from dflash_jax.config import ConfigError
from dflash_jax.weights.fields import file_bytes
from dflash_jax.weights.tensors import Tensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_AXES = 4
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", _FLOAT: "<f4", _BOOL: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class GGUFFile:
    """metadata: numbers, bools and strings as Python values; arrays of strings as lists, other arrays
    as numpy arrays. tensors: mapped, not read; shapes are row-major (the file has innermost first)."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


class _Cursor:
    """Reads forward through a mapped file and never past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.position = path, data, len(data), 0

    def take(self, count: int, what: str) -> int:
        """Advance by `count` bytes; returns where they begin."""
        begin = self.position
        if count > self.size - begin:
            raise ConfigError(
                f"{self.path}: {what} needs {count} bytes at byte {begin}, the file has {self.size}: "
                "it is truncated or damaged"
            )
        self.position = begin + count
        return begin

    def u32(self, what: str) -> int:
        return struct.unpack_from("<I", self.data, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return struct.unpack_from("<Q", self.data, self.take(8, what))[0]

    def count(self, what: str, least: int) -> int:
        """A u64 number of things that take at least `least` bytes each."""
        number = self.u64(what)
        if number > (self.size - self.position) // least:
            raise ConfigError(
                f"{self.path}: {what} is {number}, more than {self.size - self.position} remaining bytes can "
                "hold: the file is truncated or damaged"
            )
        return number

    def string(self, what: str) -> str:
        return self.strings(what, 1)[0]

    def strings(self, what: str, number: int) -> list[str]:
        """Strings one after the other; a vocabulary has 10**5 of them, hence one loop."""
        found = []
        for _ in range(number):
            begin = self.position + 8
            if begin > self.size:
                self.take(8, what)
            (length,) = struct.unpack_from("<Q", self.data, self.position)
            self.position = begin
            if length > self.size - begin:
                self.take(length, what)
            self.position += length
            found.append(self.data[begin : begin + length])
        try:
            return [raw.decode() for raw in found]
        except UnicodeDecodeError:
            raise ConfigError(f"{self.path}: {what} is not UTF-8: the file is damaged") from None


def read_file(path: Path | str) -> GGUFFile:
    """Map a GGUF file and check its header.

    Raises ConfigError for an empty, truncated or foreign file, and for counts, types, offsets or
    sizes that the file cannot hold.
    """
    path = Path(path)
    file_bytes(path)
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, data)
    magic = data[:4]
    if magic != _MAGIC:
        raise ConfigError(f"{path}: starts with {magic!r}, not {_MAGIC!r}: not a GGUF file")
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if version not in _VERSIONS:
        order = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise ConfigError(f"{path}: GGUF version {version}{order} is not supported: versions 2 and 3 are")
    # the smallest tensor entry: 8 name length, 4 axes, 4 type, 8 offset; metadata: 8 + 4 + 1
    tensor_count = cursor.count("the number of tensors", 24)
    metadata_count = cursor.count("the number of metadata values", 13)

    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise ConfigError(f"{path}: metadata key '{key}' appears twice")
        metadata[key] = _value(cursor, cursor.u32(f"the type of '{key}'"), key)
    return GGUFFile(path, metadata, _tensors(cursor, tensor_count, _alignment(path, metadata)))


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.string(f"metadata '{key}'")
    if kind == _ARRAY:
        return _array(cursor, key)
    dtype = _scalar(cursor, kind, key)
    value = np.frombuffer(cursor.data, dtype, 1, cursor.take(dtype.itemsize, f"metadata '{key}'"))[0]
    if kind == _FLOAT:
        # the shortest decimal of the float32: 1e-05 as the writer meant it, not 9.999999747378752e-06
        return float(str(value))
    return bool(value) if kind == _BOOL else value.item()


def _array(cursor: _Cursor, key: str) -> Any:
    what = f"metadata array '{key}'"
    kind = cursor.u32(what)
    if kind == _ARRAY:
        raise ConfigError(f"{cursor.path}: {what} holds arrays, which no model here needs: not supported")
    if kind == _STRING:
        return cursor.strings(what, cursor.count(what, 8))
    dtype = _scalar(cursor, kind, key)
    number = cursor.count(what, dtype.itemsize)
    values = np.frombuffer(cursor.data, dtype, number, cursor.take(number * dtype.itemsize, what))
    return values != 0 if kind == _BOOL else values


def _scalar(cursor: _Cursor, kind: int, key: str) -> np.dtype:
    if kind not in _SCALARS:
        raise ConfigError(f"{cursor.path}: metadata '{key}' has unknown type {kind}: the file is damaged")
    return np.dtype(_SCALARS[kind])


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ConfigError(f"{path}: general.alignment is {alignment!r}: it must be a power of two")
    return alignment


@dataclass(frozen=True)
class _Entry:
    """One entry of the tensor table; offset counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    row_bytes: int
    bytes: int
    offset: int


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, Tensor]:
    entries: dict[str, _Entry] = {}
    position = 0
    for _ in range(count):
        entry = _entry(cursor)
        if entry.name in entries:
            raise ConfigError(f"{cursor.path}: tensor '{entry.name}' appears twice")
        # writers lay tensors out one after the other, and ggml refuses anything else
        if entry.offset != position:
            raise ConfigError(
                f"{cursor.path}: tensor '{entry.name}' is at offset {entry.offset}, expected {position}: "
                "the file is damaged"
            )
        position = _pad(position + entry.bytes, alignment)
        entries[entry.name] = entry
    begin = _pad(cursor.position, alignment)
    for entry in entries.values():
        end = begin + entry.offset + entry.bytes
        if end > cursor.size:
            raise ConfigError(
                f"{cursor.path}: tensor '{entry.name}' ends at byte {end}, the file has {cursor.size}: "
                "it is truncated, fetch it again"
            )
    data = np.frombuffer(cursor.data, np.uint8)[begin:]
    return {name: _tensor(entry, data) for name, entry in entries.items()}


def _entry(cursor: _Cursor) -> _Entry:
    name = cursor.string("a tensor's name")
    what = f"the entry of tensor '{name}'"
    axes = cursor.u32(what)
    if not 1 <= axes <= _MAX_AXES:
        raise ConfigError(f"{cursor.path}: tensor '{name}' has {axes} axes: the file is damaged")
    sizes = [cursor.u64(what) for _ in range(axes)]
    number, offset = cursor.u32(what), cursor.u64(what)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ConfigError(
            f"{cursor.path}: tensor '{name}' has type {number}, which this gguf package does not know"
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if sizes[0] % block:
        raise ConfigError(
            f"{cursor.path}: tensor '{name}' has rows of {sizes[0]} values, not a multiple of {kind.name}'s "
            f"block of {block}"
        )
    row_bytes = sizes[0] // block * block_bytes
    return _Entry(name, tuple(sizes[::-1]), kind, row_bytes, row_bytes * math.prod(sizes[1:]), offset)


def _tensor(entry: _Entry, data: np.ndarray) -> Tensor:
    raw = data[entry.offset : entry.offset + entry.bytes]
    if len(entry.shape) == 1 and GGML_QUANT_SIZES[entry.kind][0] == 1:
        row_bytes = GGML_QUANT_SIZES[entry.kind][1]  # one value a row, so that biases can be reordered
    else:
        row_bytes = entry.row_bytes
    raw = raw.reshape(-1, row_bytes) if raw.size else np.empty((0, 0), np.uint8)
    return Tensor(entry.name, entry.shape, entry.kind.name, raw, _decoder(entry.kind))


@functools.cache
def _decoder(kind: GGMLQuantizationType) -> Callable[[np.ndarray], np.ndarray] | None:
    """Blocks -> float32, or None where gguf-py cannot decode the type.

    All rows go in as one: dequantize would otherwise loop over groups of 16 rows.
    """

    def decode(raw: np.ndarray) -> np.ndarray:
        return dequantize(raw.reshape(1, -1), kind)

    try:
        decode(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8))
    except NotImplementedError:
        return None
    return decode


def _pad(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
