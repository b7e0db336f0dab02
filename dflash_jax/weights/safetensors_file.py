"""The safetensors container: a JSON header, then raw tensors. Only this format is read from Hugging
Face folders; pickled weights are refused unread.

Layout (https://huggingface.co/docs/safetensors): u64 little-endian header length N, N bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {str: str}}, then the data, which
the offsets cover without gaps or overlaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.config import ConfigError
from dflash_jax.weights.atomic import replacing
from dflash_jax.weights.fields import Fields, file_bytes, parse_json, read_json
from dflash_jax.weights.tensors import BFLOAT16, Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# The format's own limit on the header.
_MAX_HEADER = 100 * 10**6
_MAX_AXES = 8

_FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
}
# Types that a file may hold but that are not weights to us: the size is needed to check offsets.
_OTHERS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8, "C64": 8,
}  # fmt: skip


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, mapped and checked, not read.

    Raises ConfigError for an empty or truncated file, a header that reaches past the end, and
    entries whose type, shape and offsets do not agree with each other or with the file's size.
    """
    size = file_bytes(path)
    with open(path, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ConfigError(f"{path}: {size} bytes are too few for a safetensors file: fetch it again")
        if start == b"version ":  # the text that stands in for a large file in a git repository
            raise ConfigError(
                f"{path}: is a git-lfs pointer, not the weights: run `git lfs pull` in its folder"
            )
        (length,) = struct.unpack("<Q", start)
        if length > min(size - 8, _MAX_HEADER):
            raise ConfigError(
                f"{path}: the header claims {length} bytes, the file has {size}: it is truncated "
                "or not a safetensors file"
            )
        header = parse_json(file.read(length), path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ConfigError(f"{path}: __metadata__ is not an object")

    begin = 8 + length
    entries = {name: _entry(path, name, entry, size - begin) for name, entry in header.items()}
    _check_cover(path, entries, size - begin)
    if size == begin:
        return {
            name: Tensor(name, e.shape, e.kind, np.empty((0, 0), np.uint8), None)
            for name, e in entries.items()
        }
    data = np.asarray(np.memmap(path, np.uint8, mode="r"))[begin:]
    return {name: _tensor(name, entry, data) for name, entry in entries.items()}


class _Entry:
    """One checked entry of the header; begin and end count from the start of the data."""

    def __init__(self, kind: str, shape: tuple[int, ...], begin: int, end: int) -> None:
        self.kind, self.shape, self.begin, self.end = kind, shape, begin, end


def _entry(path: Path, name: str, value: Any, available: int) -> _Entry:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: the header's entry for '{name}' is not an object")
    fields = Fields(path, value, name)
    kind = fields.text("dtype")
    shape = fields.integers("shape")
    offsets = fields.integers("data_offsets")
    if kind not in _FLOATS and kind not in _OTHERS:
        raise fields.error("dtype", f"is '{kind}', which is not a safetensors type")
    if len(shape) > _MAX_AXES or any(axis < 0 for axis in shape):
        raise fields.error("shape", f"is {list(shape)}: that is no tensor of a model")
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise fields.error("data_offsets", f"are {list(offsets)}: they must be [begin, end]")
    if offsets[1] > available:
        raise fields.error(
            "data_offsets",
            f"end at byte {offsets[1]} of {available} in the file: it is truncated, fetch it again",
        )
    width = _FLOATS[kind].itemsize if kind in _FLOATS else _OTHERS[kind]
    needed = math.prod(shape) * width
    if offsets[1] - offsets[0] != needed:
        raise fields.error(
            "data_offsets",
            f"span {offsets[1] - offsets[0]} bytes, but {kind} {list(shape)} takes {needed}",
        )
    return _Entry(kind, shape, *offsets)


def _check_cover(path: Path, entries: Mapping[str, _Entry], available: int) -> None:
    """Offsets must tile the data: an overlap or a gap means that some offset is wrong."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise ConfigError(
                f"{path}: '{name}' begins at byte {entry.begin} of the data, expected {position}: "
                "the offsets overlap or leave a gap"
            )
        position = entry.end
    if position != available:
        raise ConfigError(
            f"{path}: {available - position} bytes follow the last tensor: the header is damaged"
        )


def _tensor(name: str, entry: _Entry, data: np.ndarray) -> Tensor:
    raw = data[entry.begin : entry.end]
    rows = entry.shape[0] if entry.shape else 1
    raw = raw.reshape(rows, -1) if raw.size else np.empty((0, 0), np.uint8)
    return Tensor(name, entry.shape, entry.kind, raw, _decoder(entry.kind))


def _decoder(kind: str) -> Callable[[np.ndarray], np.ndarray] | None:
    dtype = _FLOATS.get(kind)
    return None if dtype is None else lambda raw: raw.view(dtype)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face folder: `model.safetensors`, or the shards that the index names,
    or a single safetensors file of another name.

    Raises ConfigError where there is none of these (pickled weights do not count), and where index
    and shards disagree.
    """
    if (folder / SINGLE).is_file():
        return read_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return read_file(others[0])
    if others:
        raise ConfigError(
            f"{folder}: {len(others)} safetensors files but no {SINGLE} and no {INDEX} naming them"
        )
    pickled = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in sorted(folder.glob(pattern))]
    if pickled:
        raise ConfigError(
            f"{folder}: has only pickled weights ({', '.join(pickled)}), which can run code and are never "
            "opened: convert them to safetensors"
        )
    raise ConfigError(f"{folder}: no {SINGLE}: not a folder with weights")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX
    places = Fields(index, read_json(index)).section("weight_map").values
    if not places:
        raise ConfigError(f"{index}: weight_map is missing or empty")
    for name, shard in places.items():
        # a name with a path in it could point outside the folder
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConfigError(
                f"{index}: weight_map.{name} is {shard!r}: it must be a safetensors file of this folder"
            )
    shards = sorted(set(places.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise ConfigError(f"{index}: names files that are not there: {', '.join(absent)}")

    found: dict[str, Tensor] = {}
    problems = []
    for shard in shards:
        tensors = read_file(folder / shard)
        problems += [
            f"'{name}' is in {shard}, not in the index" for name in tensors if places.get(name) != shard
        ]
        found.update(tensors)
    problems += [f"'{name}' is not in {shard}" for name, shard in places.items() if name not in found]
    if problems:
        raise ConfigError(f"{index}: index and shards disagree: " + "; ".join(problems))
    return found


def write_file(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write float arrays, one at a time (a transposed view is copied only while it is written)."""
    kinds = {dtype: kind for kind, dtype in _FLOATS.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, array in tensors.items():
        if array.dtype not in kinds:
            raise ConfigError(f"{path}: {name} has dtype {array.dtype}: only float tensors can be written")
        header[name] = {
            "dtype": kinds[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned to 8 bytes
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
