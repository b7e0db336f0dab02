"""Is speculative output the autoregressive output? Token by token, every difference explained.

Two programs that sum in another order round differently, so two tokens whose scores almost agree may
swap: a near-tie. Where the outputs of two arms differ first, the target runs once more on their common
prefix, and the distance of its choice from each of the two tokens decides: what rounding explains
(`near_tie`) for both is a near-tie, anything else is *suspicious*, a bug. What follows a difference is not
compared: it has another prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decode import next_logits
from dflash_jax.sampling import TARGET, Sampling, filtered, uniforms
from dflash_jax.state import Models

# Of logits, by dtype. bfloat16 keeps 8 bits: logits of 16 to 32 lie on a grid of 0.125, and either decoder may be a
# step off.
_LOGITS = {"float32": 1e-4, "bfloat16": 0.25}
# Of the unit interval that is drawn from, at temperature 1. Scores that move by d move a boundary between two tokens
# by d/4 at most, and that far only where each side has half of the mass.
_SHARES = {"float32": 1e-4, "bfloat16": 0.03}


def near_tie(gap: float, dtype: str, how: Sampling) -> bool:
    """Whether rounding in this dtype explains a gap (see Divergence). A low temperature enlarges what it does."""
    return gap < (_LOGITS[dtype] if how.greedy else _SHARES[dtype] / min(float(how.temperature), 1.0))


@dataclass(frozen=True)
class Divergence:
    """Row `row` differs first at output index `position`: `expected` against `got`.

    gap: how far the target's choice on the common prefix is from the further of the two. Greedy: in
    logits below the largest. Sampled: see share_distance. near_tie: rounding explains it."""

    row: int
    position: int
    expected: int
    got: int
    gap: float
    near_tie: bool


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
    dtype = jax.tree.leaves(models.target_params)[0].dtype.name
    found = []
    for row, (prompt, a, b) in enumerate(zip(prompts, expected, got, strict=True)):
        if list(a) == list(b):
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if at == min(len(a), len(b)):
            ends = [list(tokens)[at] if at < len(tokens) else -1 for tokens in (a, b)]
            found.append(Divergence(row, at, ends[0], ends[1], float("inf"), False))
            continue
        prefix = [*prompt, *a[:at]]
        gap = max(distance(models, prefix, token, how, seeds[row]) for token in (a[at], b[at]))
        found.append(Divergence(row, at, a[at], b[at], gap, near_tie(gap, dtype, how)))
    return found


def distance(models: Models, prefix: Sequence[int], token: int, how: Sampling, seed: int) -> float:
    """How far the target is from choosing `token` after `prefix`: 0 when it does."""
    logits = next_logits(models, [prefix])[:, None]
    if how.greedy:
        return float(logits.max() - logits[0, 0, token])
    kept = int(np.isfinite(filtered(logits, how)).sum())
    point = float(uniforms(jnp.asarray([seed]), jnp.asarray([[len(prefix)]]), TARGET)[0, 0])
    return share_distance(np.asarray(logits)[0, 0], kept, token, point, how)


def share_distance(logits: np.ndarray, kept: int, token: int, point: float, how: Sampling) -> float:
    """How far `point` is from the token's share of the unit interval, in which tokens lie by their number.

    logits: [V]. kept: of how many tokens the filters leave; rounding may move their edge as it moves the shares. So
    every number of tokens counts, and the two at the edge in either order, with the probability by which the filters
    miss that choice where it is the larger distance."""
    scores = logits.astype(np.float64) / float(how.temperature)
    weights = np.exp(scores - scores.max())
    order = np.argsort(-weights, kind="stable")
    swapped = order.copy()
    swapped[kept - 1 : kept + 1] = order[kept - 1 : kept + 1][::-1]
    most = min(how.top_k or len(order), len(order))
    edge = weights[order[kept - 1 : kept + 1]] / weights[order[:most]].sum()
    gaps = [_share_distances(weights, one, kept, token, point, how) for one in (order, swapped)]
    return float(min(gaps[0].min(), np.maximum(gaps[1], edge[0] - edge[-1]).min()))


def _share_distances(
    weights: np.ndarray, order: np.ndarray, kept: int, token: int, point: float, how: Sampling
) -> np.ndarray:
    """[V] for the first 1, 2, ... of `order`."""
    most = min(how.top_k or len(order), len(order))
    shares = weights[order] / weights[order[:most]].sum()
    mass = shares.cumsum()
    inside = (order == token).cumsum() > 0
    start = (shares * (order < token)).cumsum() / mass
    end = start + shares[order == token] / mass
    away = np.where(inside, np.maximum(start - point, point - end), np.inf)
    # The nucleus ends with the token that completes top_p; top_k leaves out what is lighter than the k-th.
    missed = np.maximum(float(how.top_p) - mass, mass - shares - float(how.top_p))
    missed[most:] = np.maximum(missed[most:], shares[most - 1] - shares[most:])
    missed[kept - 1] = 0.0
    return np.maximum(np.maximum(away, missed), 0.0)
