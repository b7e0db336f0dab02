"""Block-size policies, by themselves. Their use in the loops is in test_decode.py."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import ConfigError
from dflash_jax.policy import Adaptive, Fixed

ADAPTIVE = Adaptive((2, 4, 8, 16))


def after(policy: Adaptive, rounds: list[list[int]]) -> int:
    """The size that follows these rounds, from the start."""
    p = policy.init()
    for committed in rounds:
        p = policy.update(p, jnp.asarray(committed, jnp.int32), jnp.zeros(1))
    return policy.sizes[int(policy.choose(p))]


def test_fixed_has_no_state() -> None:
    policy = Fixed(5)
    assert policy.sizes == (5,)
    assert policy.choose(policy.update(policy.init(), jnp.asarray([3], jnp.int32), jnp.zeros(1))) == 0


@pytest.mark.parametrize("sizes", [(), (4, 2), (2, 2), (0, 2), (-1,)])
def test_sizes_are_positive_ascending_distinct(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="block sizes"):
        Adaptive(sizes)


def test_fixed_size_is_positive() -> None:
    with pytest.raises(ConfigError, match="block sizes"):
        Fixed(0)


def test_policies_are_static_arguments() -> None:
    assert hash(Adaptive((2, 4))) == hash(Adaptive((2, 4)))
    assert Adaptive((2, 4)) == Adaptive((2, 4)) != Adaptive((2, 4), headroom=3.0)
    assert hash(Fixed(4)) == hash(Fixed(4))


def test_adaptive_starts_large_and_shrinks_without_acceptance() -> None:
    assert after(ADAPTIVE, []) == 16
    sizes = [after(ADAPTIVE, [[1]] * n) for n in range(30)]
    assert sizes == sorted(sizes, reverse=True), "shrinks monotonically"
    assert sizes[-1] == 2


def test_adaptive_grows_back_one_size_at_a_time_when_blocks_are_accepted_whole() -> None:
    """Each size that is accepted whole must be able to ask for the next: else the policy is stuck."""
    p = ADAPTIVE.init()
    for _ in range(40):
        p = ADAPTIVE.update(p, jnp.asarray([1], jnp.int32), jnp.zeros(1))
    seen = []
    for _ in range(60):
        size = ADAPTIVE.sizes[int(ADAPTIVE.choose(p))]
        seen.append(size)
        p = ADAPTIVE.update(p, jnp.asarray([size], jnp.int32), jnp.zeros(1))
    assert [size for i, size in enumerate(seen) if i == 0 or seen[i - 1] != size] == [2, 4, 8, 16]


def test_adaptive_keeps_the_smallest_size_with_headroom() -> None:
    """A steady mean of m tokens, m - 1 candidates, settles on the smallest size >= 1 + 2 (m - 1)."""
    for mean, size in ((1, 2), (1.5, 2), (1.6, 4), (2.5, 4), (2.6, 8), (4.5, 8), (4.6, 16), (12, 16)):
        p = jnp.asarray(mean, jnp.float32)
        assert ADAPTIVE.sizes[int(ADAPTIVE.choose(p))] == size, mean


def test_rows_that_are_done_do_not_count() -> None:
    p = ADAPTIVE.init()
    alone = ADAPTIVE.update(p, jnp.asarray([4, 2], jnp.int32), jnp.zeros(2))
    with_done = ADAPTIVE.update(p, jnp.asarray([4, 0, 2, 0], jnp.int32), jnp.zeros(4))
    np.testing.assert_array_equal(alone, with_done)
    np.testing.assert_allclose(float(alone), 0.8 * float(p) + 0.2 * 3, rtol=1e-6)
    assert np.isfinite(float(ADAPTIVE.update(p, jnp.zeros(3, jnp.int32), jnp.zeros(3))))
