"""What the tests of the loops share: one pair, one batch of prompts, and so one set of programs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from dflash_jax import decode, testing
from dflash_jax.policy import Fixed
from dflash_jax.sampling import Sampling, sampling
from dflash_jax.state import Models, Options, RoundState

VOCAB, C = testing.VOCAB, testing.BLOCK
BUDGET = 40
LENGTHS = (3, 12, 1, 7, 15, 5, 9, 2)
PROMPTS = [[(5 * i + 3 * j + i * j * j) % VOCAB for j in range(n)] for i, n in enumerate(LENGTHS)]
SEEDS = [11 * i + 5 for i in range(len(PROMPTS))]
BLOCKS = Options(Fixed(C))


@functools.cache
def pair(family: str = "qwen3") -> Models:
    return testing.make_models(testing.target_config(family))


def warm() -> Sampling:
    """Every filter is on and removes something."""
    return sampling(1.1, top_p=0.9, top_k=8)


@functools.cache
def _autoregressive(sampled: bool) -> list[list[int]]:
    models = pair().without_draft()
    how = warm() if sampled else sampling()
    generation = decode.complete(models, PROMPTS, BLOCKS, max_new_tokens=BUDGET, how=how, seeds=SEEDS)
    return generation.tokens


def autoregressive(sampled: bool = False) -> list[list[int]]:
    """The target's own output for every prompt: what every other way of decoding must give."""
    return [list(row) for row in _autoregressive(sampled)]


def perfect(wrong: np.ndarray | bool = False, sampled: bool = False) -> Models:
    """The pair with a draft that recites the target's own output, except where it is wrong."""
    texts = [[*prompt, *row] for prompt, row in zip(PROMPTS, autoregressive(sampled), strict=True)]
    return testing.scripted(pair(), texts, wrong)


def rounds_of(total: int, size: int, wrong: Sequence[bool] | np.ndarray = ()) -> list[int]:
    """Tokens kept per round when `total` tokens are emitted, the first by the prefill; wrong[i]: the
    draft is wrong about token i of the output."""
    kept, done = [], 1
    while done < total:
        count = 1
        while count < size and not (done + count - 1 < len(wrong) and wrong[done + count - 1]):
            count += 1
        kept.append(min(count, total - done))
        done += kept[-1]
    return kept


def cut(row: list[int], stops: Sequence[int]) -> list[int]:
    """The output up to and with its first stop token."""
    ends = [i for i, token in enumerate(row) if token in stops]
    return row[: ends[0] + 1] if ends else row


def snapshot(tree: object) -> list[np.ndarray]:
    """Host copies of every array of a pytree (typed keys are not arrays that copy: there are none)."""
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def assert_unchanged(tree: object, before: list[np.ndarray]) -> None:
    for old, leaf in zip(before, jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(old, np.asarray(leaf))


def assert_caches_close(a: RoundState, b: RoundState, atol: float = 2e-4) -> None:
    """Equal lengths, and equal keys and values of every committed position, in both caches."""
    for one, two in ((a.target_cache, b.target_cache), (a.draft_cache, b.draft_cache)):
        assert (one is None) == (two is None)
        if one is None or two is None:
            continue
        np.testing.assert_array_equal(one.length, two.length)
        for row, length in enumerate(np.asarray(one.length)):
            for layer, other in zip(one.layers, two.layers, strict=True):
                for name in ("k", "v"):
                    np.testing.assert_allclose(
                        np.asarray(getattr(layer, name))[row, :, :length],
                        np.asarray(getattr(other, name))[row, :, :length],
                        atol=atol,
                        err_msg=f"{name} of row {row}",
                    )


def assert_same_run(a: RoundState, b: RoundState) -> None:
    """Two states that went the same way: outputs, rounds and caches."""
    for name in ("emitted", "reason", "anchor", "rounds", "seeds"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    rounds = int(a.rounds)
    np.testing.assert_array_equal(a.committed[:, :rounds], b.committed[:, :rounds])
    np.testing.assert_array_equal(a.sizes[:rounds], b.sizes[:rounds])
    for row, n in enumerate(np.asarray(a.emitted)):
        np.testing.assert_array_equal(a.tokens[row, :n], b.tokens[row, :n])
    assert_caches_close(a, b)
