"""Block-size policies, by themselves. Their use in the loops is in test_decode.py."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import ConfigError
from dflash_jax.policy import Adaptive, Fixed, Seen

# Draft free, verify 10 for a pass and 1 a row: a block of n pays while its last candidates are likely enough.
SIZES = (1, 2, 4, 8, 16)
ADAPTIVE = Adaptive(SIZES, draft_ms=(0.0, 2.0, 2.0, 2.0, 2.0), verify_ms=tuple(10.0 + n for n in SIZES))


def seen(committed: list[int], drafted: int, expected: float = 1.0, verified: int = 0) -> Seen:
    return Seen(
        jnp.asarray(committed, jnp.int32),
        jnp.asarray(drafted, jnp.int32),
        jnp.asarray(verified or drafted, jnp.int32),
        jnp.full(len(committed), expected, jnp.float32),
    )


def simulate(policy: Adaptive, accepts: float | list[float], rounds: int, seed: int = 0) -> list[int]:
    """Block sizes when every candidate is right with this probability (one for each round, if a list)."""
    rng, p, sizes = np.random.default_rng(seed), policy.init(), []
    update, choose = jax.jit(policy.update), jax.jit(policy.choose)
    for i in range(rounds):
        size = policy.sizes[int(choose(p))]
        right = rng.random(size - 1) < (accepts[i] if isinstance(accepts, list) else accepts)
        committed = 1 + int(np.cumprod(right).sum())
        sizes.append(size)
        p = update(p, seen([committed], size))
    return sizes


def both_stages(
    policy: Adaptive, accepts: float, promises: float, rounds: int, seed: int = 0
) -> tuple[list[int], list[int]]:
    """Block sizes and verified rows when every candidate is right with one probability, and the draft says another."""
    rng, p = np.random.default_rng(seed), policy.init()
    update, before, after = (
        jax.jit(policy.update),
        jax.jit(lambda p: policy.choose(p)),
        jax.jit(policy.choose),
    )
    sizes: list[int] = []
    rows: list[int] = []
    weight = np.log(promises) * np.arange(max(policy.sizes[-1], policy.rows[-1]))
    for _ in range(rounds):
        sizes.append(policy.sizes[int(before(p))])
        known = np.where(np.arange(len(weight)) < sizes[-1], weight, -np.inf).astype(np.float32)
        rows.append(policy.rows[int(after(p, jnp.asarray(known)[None]))])
        looked = min(sizes[-1], rows[-1])
        committed = 1 + int(np.cumprod(rng.random(looked - 1) < accepts).sum())
        p = update(p, seen([committed], sizes[-1], float(np.exp(known[: rows[-1]]).sum()), rows[-1]))
    return sizes, rows


def speeds(policy: Adaptive, accepts: float) -> dict[int, float]:
    """Tokens a unit of time of every size, by the formula."""
    costs = [d + v for d, v in zip(policy.draft_ms, policy.verify_ms, strict=True)]
    return {n: sum(accepts**i for i in range(n)) / cost for n, cost in zip(policy.sizes, costs, strict=True)}


def test_fixed_has_no_state() -> None:
    policy = Fixed(5)
    assert policy.sizes == policy.rows == (5,)
    assert policy.choose(policy.update(policy.init(), seen([3], 5))) == 0
    assert Fixed(5, 12).rows == (12,)


@pytest.mark.parametrize("sizes", [(), (4, 2), (2, 2), (0, 2), (-1,)])
def test_sizes_are_positive_ascending_distinct(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="block sizes"):
        Adaptive(sizes)
    with pytest.raises(ConfigError, match="block sizes"):
        Adaptive((2, 4), rows=(4, 2))


def test_every_size_has_its_time() -> None:
    with pytest.raises(ConfigError, match="needs its time"):
        Adaptive((2, 4), draft_ms=(1.0,))
    with pytest.raises(ConfigError, match="needs its time"):
        Adaptive((2, 4), rows=(2, 3, 4), verify_ms=(1.0, 2.0))
    with pytest.raises(ConfigError, match="block sizes"):
        Fixed(0)


def test_policies_are_static_arguments() -> None:
    assert hash(Adaptive((2, 4))) == hash(Adaptive((2, 4)))
    assert Adaptive((2, 4)) == Adaptive((2, 4)) != Adaptive((2, 4), prior=0.5)
    assert hash(Fixed(4)) == hash(Fixed(4))


@pytest.mark.parametrize("accepts", [0.05, 0.4, 0.6, 0.8, 0.95])
def test_the_sizes_chosen_are_nearly_as_fast_as_the_best_one(accepts: float) -> None:
    speed = speeds(ADAPTIVE, accepts)
    chosen = [speed[size] for size in simulate(ADAPTIVE, accepts, 400)[100:]]
    assert np.mean(chosen) > 0.95 * max(speed.values())


def test_a_useless_draft_is_left_alone_and_tried_again() -> None:
    sizes = simulate(ADAPTIVE, 0.0, 200)
    assert sizes[0] > 1
    assert np.mean([size == 1 for size in sizes]) > 0.7
    assert len({i for i, size in enumerate(sizes) if size > 1 and i > 20}) > 2, "bad days are forgotten"


def test_it_follows_a_draft_that_gets_better() -> None:
    sizes = simulate(ADAPTIVE, [0.0] * 100 + [0.97] * 150, 250)
    assert np.mean(sizes[60:100]) < 3 and np.mean(sizes[-60:]) > 8


def test_dear_verifies_make_small_blocks() -> None:
    dear = dataclasses.replace(ADAPTIVE, verify_ms=tuple(10.0 + 10 * n for n in SIZES))
    assert np.mean(simulate(dear, 0.8, 200)[50:]) < np.mean(simulate(ADAPTIVE, 0.8, 200)[50:])


CHAIN = Adaptive(
    (8,), rows=tuple(range(1, 9)), draft_ms=(2.0,), verify_ms=tuple(10.0 + n for n in range(1, 9))
)


def rows_for(probabilities: list[float], p=None, policy: Adaptive = CHAIN) -> int:
    weight = np.concatenate([[0.0], np.cumsum(np.log(probabilities))])
    p = policy.init() if p is None else p
    return policy.rows[int(policy.choose(p, jnp.asarray([weight], jnp.float32)))]


def test_confidence_decides_how_far_to_verify() -> None:
    assert rows_for([0.99] * 7) == 8
    assert rows_for([0.01] * 7) == 1
    assert rows_for([0.9, 0.9, 0.9, 0.01, 0.9, 0.9, 0.9]) == 4


def test_a_draft_that_promises_too_much_is_believed_less() -> None:
    p = CHAIN.init()
    for _ in range(30):
        p = CHAIN.update(p, seen([1], 8, expected=6.0))
    assert rows_for([0.6] * 7, p) < rows_for([0.6] * 7)


def test_rows_that_are_done_do_not_count() -> None:
    alone = ADAPTIVE.update(ADAPTIVE.init(), seen([4, 2], 8, 3.0))
    with_done = ADAPTIVE.update(ADAPTIVE.init(), seen([4, 0, 2, 0], 8, 3.0))
    jax.tree.map(np.testing.assert_array_equal, alone, with_done)
    # candidate 1 was accepted by both rows, 2 and 3 by one, 4 by none of the one that reached it
    np.testing.assert_allclose(alone.accepted[:5], [1, 0.5, 0.5, 0, 0])
    np.testing.assert_allclose(alone.reached[:6], [1, 1, 0.5, 0.5, 0, 0])
    np.testing.assert_allclose([alone.kept, alone.promised], [2, 2])
    none = ADAPTIVE.update(ADAPTIVE.init(), seen([0, 0], 8))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(none))


def test_an_unsure_draft_that_is_wrong_is_not_asked_for_ever() -> None:
    """To draft and then to verify one row is the dearest way to decode autoregressively."""
    sizes, _ = both_stages(ADAPTIVE, accepts=0.02, promises=0.02, rounds=300)
    assert np.mean([size == 1 for size in sizes[50:]]) > 0.7


def test_a_draft_that_promises_too_little_is_found_out() -> None:
    """By its own promise alone it is never verified, and so never learned of."""
    looked = [min(pair) for pair in zip(*both_stages(ADAPTIVE, 0.5, promises=0.1, rounds=300), strict=True)]
    assert np.mean(looked[100:]) > 1.8
    blind = dataclasses.replace(ADAPTIVE, look=1000)
    unseen = [min(pair) for pair in zip(*both_stages(blind, 0.5, promises=0.1, rounds=300), strict=True)]
    assert np.mean(unseen[100:]) < 1.2


def test_a_tree_costs_its_budget_until_less_was_spent() -> None:
    """A tree fills its budget from any depth: before the draft, all of it counts, or the share lately verified."""
    tree = Adaptive((1, 4), rows=(1, 8, 64), draft_ms=(0.0, 2.0), verify_ms=(10.0, 12.0, 50.0))
    assert tree.sizes[int(tree.choose(tree.init()))] == 1
    p = tree.init()
    for _ in range(20):
        p = tree.update(p, seen([3], 4, expected=2.5, verified=8))
    assert tree.sizes[int(tree.choose(p))] == 4


def test_what_was_not_drafted_is_not_judged() -> None:
    """A block of 2 that is accepted whole says nothing of candidate 2."""
    p = ADAPTIVE.update(ADAPTIVE.init(), seen([2], 2))
    np.testing.assert_allclose(p.reached[:3], [1, 0, 0])
    confident = jnp.asarray([[0.0, -0.1, -0.2], [-jnp.inf, -jnp.inf, -jnp.inf]])
    policy = Adaptive((3,), rows=(1, 2, 3))
    one = policy.choose(policy.init(), confident[:1])
    assert int(policy.choose(policy.init(), confident)) == int(one), "a row that is done has no say"
