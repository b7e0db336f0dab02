"""Tensors that lie in a file, and the one way to read them: compare all names and shapes first, then
convert in parallel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from dflash_jax.config import ConfigError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# Values converted at a time: 1 MB of float32, so that a piece is dequantised and cast
# within a core's cache. SmolLM2 (135M values, Q4_1 to float32, 2 cores): 0.85 s; 1.4 s with pieces four
# times larger, 1.7 s tensor by tensor.
_PIECE = 2**18


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file, not read yet.

    shape: row-major, as Hugging Face names it ([out, in] for a projection).
    kind: the file's name of the element type.
    raw: [rows, bytes of a row] view of the mapped file; one value a row where shape has one axis.
    decode: raw rows -> values of any float dtype, or None where the type holds no floats.
    order: which raw row is row i; None as they lie.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    raw: np.ndarray
    decode: Callable[[np.ndarray], np.ndarray] | None
    order: np.ndarray | None = None

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start:stop as floats [stop - start, columns]."""
        assert self.decode is not None
        raw = self.raw[start:stop] if self.order is None else self.raw[self.order[start:stop]]
        return self.decode(raw).reshape(stop - start, -1)


@dataclass(frozen=True)
class Wanted:
    """What a tensor of a file fills: a parameter, or a part of one.

    path: of the parameter in the tree. shape: of the tensor in the file.
    whole: the parameter's own shape, where that is another; part: the index of the tensor's values in it
    (one expert, the gate half of all experts).
    """

    path: str
    shape: tuple[int, ...]
    whole: tuple[int, ...] = ()
    part: tuple[int | slice, ...] = ()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts -> {dotted path: leaf}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted path: leaf} -> nested dicts."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def wanted(abstract: Mapping[str, Any], name: Callable[[str], str]) -> dict[str, Wanted]:
    """What a tree of shapes (jax.ShapeDtypeStruct or arrays) asks of a file: {name there: parameter}."""
    return {name(path): Wanted(path, tuple(leaf.shape)) for path, leaf in flatten(abstract).items()}


def load(
    file: object,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Wanted],
    dtype: DTypeLike,
    problems: Iterable[str] = (),
) -> dict[str, Any]:
    """Fill a tree of parameters in `dtype`. `found` must be exactly what is expected: see `check`, which
    comes first. Nothing is allocated before that.
    """
    check(file, found, expected, problems)
    dtype = np.dtype(dtype)
    params: dict[str, np.ndarray] = {}
    jobs: list[_Job] = []
    for name, want in expected.items():
        if want.path not in params:
            params[want.path] = np.empty(want.whole or want.shape, dtype)
        jobs += _jobs(found[name], params[want.path][want.part])
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        for _ in pool.map(_convert, jobs):
            pass
    return nest(params)


def check(
    file: object, found: Mapping[str, Tensor], expected: Mapping[str, Wanted], problems: Iterable[str] = ()
) -> None:
    """Raises one ConfigError that lists every missing, unknown, misshapen and unreadable tensor, after
    `problems` that the caller has found."""
    complaints = list(problems)
    complaints += [f"missing {name} {list(expected[name].shape)}" for name in expected if name not in found]
    complaints += [f"unknown {name} {list(found[name].shape)}" for name in found if name not in expected]
    for name, want in expected.items():
        tensor = found.get(name)
        if tensor is None:
            continue
        if tensor.shape != want.shape:
            complaints.append(f"{name} is {list(tensor.shape)}, expected {list(want.shape)}")
        elif tensor.decode is None:
            complaints.append(f"{name} has type {tensor.kind}, which cannot be read as weights")
    if complaints:
        raise ConfigError(f"{file}: tensors and config do not fit: " + "; ".join(complaints))


_Job = tuple[Tensor, int, np.ndarray]  # a tensor, its first row, and where that and further rows go


def _jobs(tensor: Tensor, out: np.ndarray) -> list[_Job]:
    """`out` in pieces, each [rows, columns] as the file has them, whatever the number of axes."""
    # only slices of a part that does not lie in one piece can be seen as rows without a copy
    slices = [out] if out.flags.c_contiguous else list(out)
    count = len(tensor.raw) // len(slices)
    jobs = []
    for i, slice_ in enumerate(slices):
        rows = slice_.reshape(count, -1)
        step = max(1, _PIECE // rows.shape[1])
        jobs += [(tensor, i * count + start, rows[start : start + step]) for start in range(0, count, step)]
    return jobs


def _convert(job: _Job) -> None:
    tensor, start, out = job
    # a damaged file may hold infinities; what they become is not this loop's business
    with np.errstate(all="ignore"):
        out[:] = widen(tensor.rows(start, start + len(out)), out.dtype)


def widen(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """bfloat16 -> float32 by shifting bits, which (unlike ml_dtypes' cast) lets other threads run."""
    if values.dtype == BFLOAT16 and dtype == np.float32:
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values
