"""Host-side planning: what a request is cut into, so that few programs cover all of them."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dflash_jax.config import ConfigError

_SHORTEST_PREFIX = 256
# XLA copies a prefix before it reads it, so a prefix pays where it is less than a third of the whole.
_WHOLE_IS_CHEAPER = 3


def prefixes(slots: int) -> tuple[int, ...]:
    """The cache prefixes that are compiled: attention costs what is committed, not what is allocated.
    Each is 4 times the one before, so that few programs cover any length; the last is the whole."""
    lengths = []
    length = _SHORTEST_PREFIX
    while length * _WHOLE_IS_CHEAPER < slots:
        lengths.append(length)
        length *= 4
    return (*lengths, slots)


def bucket(n: int) -> int:
    """Sizes that programs are compiled for: powers of two up to 1024, then multiples of 1024."""
    return max(64, 1 << (n - 1).bit_length()) if n <= 1024 else -(-n // 1024) * 1024


def check_prompts(
    prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], chunk_size: int, vocab: int
) -> tuple[list[list[int]], np.ndarray]:
    rows = [[int(token) for token in prompt] for prompt in prompts]
    limits = np.broadcast_to(np.asarray(max_new_tokens, np.int64), (len(rows),))
    if not rows or not all(rows):
        raise ConfigError("a prompt is empty: every row needs at least one token")
    if chunk_size < 1:
        raise ConfigError(f"chunk_size is {chunk_size}: it must be positive")
    if limits.min() < 1:
        raise ConfigError("max_new_tokens must be at least 1: a budget of 0 needs no model")
    for row in rows:
        if not 0 <= min(row) <= max(row) < vocab:
            raise ConfigError(
                f"token id {min(row) if min(row) < 0 else max(row)} is outside the {vocab} rows"
            )
    return rows, limits


def chunks_of(start: np.ndarray, lengths: np.ndarray, size: int) -> list[tuple[int, int, np.ndarray]]:
    """(first prompt index, compiled width, committed length of each row) per chunk. Only the last
    chunk is narrower, and in few widths, as each is compiled."""
    longest = int(lengths.max())
    return [
        (
            first,
            min(size, _width(longest - first)),
            start + np.minimum(lengths, first),
        )
        for first in range(0, longest, size)
    ]


def _width(rows: int) -> int:
    """16, 24, 32, 48, 64, 96, ...: a third of them is padding at most, where powers of two pad up to a half."""
    power = max(16, 1 << (rows - 1).bit_length())
    between = 3 * power // 4
    return between if rows <= between and between > 16 else power


def stop_array(stop_ids: Sequence[int]) -> Array:
    """Padded with -1 to a power of two, so that the number of stop ids rarely compiles again."""
    ids = [int(i) for i in stop_ids if i >= 0]
    width = max(4, 1 << max(0, len(ids) - 1).bit_length())
    return jnp.asarray(ids + [-1] * (width - len(ids)), jnp.int32)
