"""Files with random damage: what a reader must answer with one sentence or a correct load."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from dflash_jax.config import ConfigError


def damaged(data: bytes, head: int, rng: np.random.Generator) -> bytes:
    """A few random changes, most of them in the first `head` bytes, where they matter."""
    changed = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(min(head, len(changed)) if rng.random() < 0.8 else len(changed)))
        match rng.integers(4):
            case 0:
                changed[at] ^= 1 << int(rng.integers(8))
            case 1:
                changed[at] = int(rng.integers(256))
            case 2:
                changed[at : at + 8] = b"\xff" * len(changed[at : at + 8])
            case _:
                del changed[at + 1 :]
    return bytes(changed)


def assert_only_config_errors(
    load: Callable[[bytes, int], None], data: bytes, head: int, seed: int, count: int = 200
) -> None:
    rng = np.random.default_rng(seed)
    refused = 0
    for i in range(count):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", UserWarning)  # ours: a changed config may deserve one
                load(damaged(data, head, rng), i)
        except ConfigError as error:
            assert "\n" not in str(error)
            refused += 1
    assert count / 2 < refused < count  # the damage reached the checks, and some of it is harmless
