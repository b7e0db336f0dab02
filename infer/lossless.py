"""Is speculative output the autoregressive output? Token by token, every difference explained.

Two programs that sum in another order round differently, so two tokens whose scores almost agree may
swap: a near-tie. Where the outputs of two arms differ first, the target runs once more on their common
prefix, and the distance of its choice from each of the two tokens decides: below NEAR_TIE for both it is
a near-tie, anything else is *suspicious*, a bug. What follows a difference is not compared: it has
another prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from dflash_jax.decode import next_logits
from dflash_jax.sampling import TARGET, Sampling, filtered, uniforms
from dflash_jax.state import Models

NEAR_TIE = 1e-4
# By dtype. bfloat16 keeps 8 bits: logits of 16 to 32 lie on a grid of 0.125, and either decoder may be a step off.
NEAR_TIES = {"float32": NEAR_TIE, "bfloat16": 0.25}


@dataclass(frozen=True)
class Divergence:
    """Row `row` differs first at output index `position`: `expected` against `got`.

    gap: how far the target's choice on the common prefix is from the further of the two. Greedy: in
    logits below the largest. Sampled: in probability between the draw's random number and the token's
    share of the unit interval (infinite for a token that a filter removes)."""

    row: int
    position: int
    expected: int
    got: int
    gap: float

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE


def divergences(
    models: Models,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
    how: Sampling,
    seeds: Sequence[int],
) -> list[Divergence]:
    """The first difference of every row, with its gap. Rows that agree are not in the list; an output
    that is a proper prefix of the other differs at its end, with an infinite gap."""
    found = []
    for row, (prompt, a, b) in enumerate(zip(prompts, expected, got, strict=True)):
        if list(a) == list(b):
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if at == min(len(a), len(b)):
            ends = [list(tokens)[at] if at < len(tokens) else -1 for tokens in (a, b)]
            found.append(Divergence(row, at, ends[0], ends[1], float("inf")))
            continue
        prefix = [*prompt, *a[:at]]
        gap = max(distance(models, prefix, token, how, seeds[row]) for token in (a[at], b[at]))
        found.append(Divergence(row, at, a[at], b[at], gap))
    return found


def distance(models: Models, prefix: Sequence[int], token: int, how: Sampling, seed: int) -> float:
    """How far the target is from choosing `token` after `prefix`: 0 when it does."""
    logits = next_logits(models, [prefix])[:, None]
    if how.greedy:
        return float(logits.max() - logits[0, 0, token])
    weights = np.exp(np.asarray(filtered(logits, how)[0, 0], np.float64))
    if weights[token] == 0:
        return float("inf")
    ends = np.cumsum(weights) / weights.sum()
    point = float(uniforms(jnp.asarray([seed]), jnp.asarray([[len(prefix)]]), TARGET)[0, 0])
    start = ends[token - 1] if token else 0.0
    return max(start - point, point - ends[token], 0.0)
