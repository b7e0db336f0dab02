"""The target's embedding table in host memory: its rows are looked up by NumPy, a round's few at a time.

Luce keeps `token_embd` mapped on the CPU for the same reason (`CpuEmbedder`): a table is V * D values of which a
forward reads T rows.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from jaxtyping import Array


class HostTable:
    """weight [V, D]. seconds: what look-ups took so far, with the tokens' way here and the rows' way back, and
    without waiting for whatever computes the tokens."""

    def __init__(self, weight: np.ndarray) -> None:
        self.weight = weight
        self.seconds = 0.0

    def rows(self, tokens: Any, like: Array) -> Array:
        """Embeddings [B, T, D] of tokens [B, T], beside `like`."""
        tokens = jax.block_until_ready(tokens)
        begin = time.perf_counter()
        rows = jax.block_until_ready(jax.device_put(self.weight[np.asarray(tokens)], like.sharding))
        self.seconds += time.perf_counter() - begin
        return rows


def take_table(params: dict[str, Any], tied: bool) -> tuple[dict[str, Any], HostTable]:
    """The target's parameters without the embedding table, and the table. tied: it is the head too, and stays."""
    table = HostTable(np.asarray(params["embed_tokens"]["weight"]))
    return params if tied else {k: v for k, v in params.items() if k != "embed_tokens"}, table
