"""Filters against NumPy, ties and thresholds exactly, keys, and walks with known answers.

That the tokens have the right distribution is in test_distribution.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import assume, given
from hypothesis import strategies as st

from dflash_jax import sampling as module
from dflash_jax.block import chain_block, tree_block
from dflash_jax.config import ConfigError
from dflash_jax.sampling import Sampling, accept, choose, filtered, propose_samples, sampling

V = 12


@given(
    st.lists(st.integers(-6, 6), min_size=V, max_size=V),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.floats(0.05, 1.0),
    st.integers(0, V + 1),
)
def test_filters_keep_what_sorting_keeps(halves: list[int], temperature: float, top_p: float, top_k: int):
    """Logits on a grid: ties are everywhere, and all of a tie stays or goes."""
    logits = np.array(halves, np.float32) / 2
    probs, margin = reference.filtered(logits, temperature, top_p, top_k)
    assume(margin > 1e-5)  # which side of the threshold is a matter of rounding: exact cases are below
    expected = set(np.flatnonzero(probs).tolist())
    out = np.asarray(filtered(jnp.asarray(logits)[None, None], sampling(temperature, top_p, top_k)))[0, 0]
    assert set(np.flatnonzero(np.isfinite(out)).tolist()) == expected
    np.testing.assert_allclose(out[sorted(expected)], logits[sorted(expected)] / temperature)


def test_filters_apply_in_order() -> None:
    """After top-k 2 of (.4, .3, .2, .1) the first token alone is 4/7: top-p 0.5 keeps one, where top-p
    first would keep two."""
    logits = jnp.log(jnp.asarray([[[0.4, 0.3, 0.2, 0.1]]]))
    out = np.asarray(filtered(logits, sampling(1.0, 0.5, 2)))
    assert np.isfinite(out).tolist() == [[[True, False, False, False]]]
    # And temperature before both: at temperature 2 the first token has less than half.
    assert np.isfinite(np.asarray(filtered(logits, sampling(2.0, 0.55, 2)))).sum() == 2


def nucleus(probs: np.ndarray, mass: float) -> list[bool]:
    """What `filtered` keeps of probabilities whose sums are exact (a softmax of their logs is not)."""
    values = jnp.asarray(probs, jnp.float32)[None, None]

    def enough(kept: jax.Array) -> jax.Array:
        return jnp.where(kept, values, 0.0).sum(-1) >= np.float32(mass)

    return np.asarray(module._at_least(values, enough))[0, 0].tolist()


@pytest.mark.parametrize(
    ("mass", "smallest"),
    [(0.25, 0.5), (0.5, 0.5), (0.5 + 2**-20, 0.25), (0.75, 0.25), (0.75 + 2**-20, 0.125), (1.0, 0.125)],
)
def test_nucleus_threshold_is_exact(mass: float, smallest: float) -> None:
    """The boundary belongs to the smaller set, and both of a tie stay."""
    probs = np.array([0.125, 0.5, 0.0, 0.25, 0.125])
    assert nucleus(probs, mass) == (probs >= smallest).tolist()


@given(st.lists(st.integers(0, 64), min_size=V, max_size=V).filter(any), st.integers(1, 256))
def test_nucleus_threshold_is_the_largest_that_keeps_the_mass(weights: list[int], share: int) -> None:
    probs = np.array(weights, np.float32) / 1024  # exact, as are all their sums
    mass = np.float32(share / 256 * probs.sum())
    threshold = max(p for p in probs if probs[probs >= p].sum() >= mass)
    assert nucleus(probs, mass) == (probs >= threshold).tolist()


@given(
    st.lists(st.integers(0, 9), min_size=V, max_size=V).filter(any),
    st.integers(0, 2**12 - 1),
    st.sampled_from([2, 5, V]),
)
def test_a_draw_is_where_the_uniform_falls(weights: list[int], point: int, vocab: int) -> None:
    """The token whose share of the total holds the point: exact here, as all sums are."""
    weights = weights[-vocab:]
    assume(any(weights))
    shares = np.array(weights, np.float32)
    uniform = np.float32(point / 2**12)
    drawn = module._draw(jnp.asarray(shares)[None, None], jnp.full((1, 1), uniform))
    assert int(drawn[0, 0]) == np.searchsorted(np.cumsum(shares), uniform * shares.sum(), side="right")


@pytest.mark.parametrize("vocab", [1, 2, 100, 1000])
def test_a_draw_at_the_ends_has_weight(vocab: int) -> None:
    """Where rounding puts the point at the end of all shares, the last token that has one is drawn."""
    shares = np.zeros((1, 1, vocab), np.float32)
    shares[0, 0, vocab // 3 : vocab // 2 + 1] = 0.1
    for uniform in (0.0, 1 - 2**-24, 1.0):
        drawn = int(module._draw(jnp.asarray(shares), jnp.full((1, 1), uniform))[0, 0])
        assert shares[0, 0, drawn] > 0
        assert drawn == (vocab // 3 if uniform == 0 else vocab // 2)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1"),
    ],
)
def test_settings_are_refused(fields: dict[str, float], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        sampling(**fields)


def test_only_what_changes_the_program_is_static() -> None:
    def structure(how: Sampling) -> object:
        return jax.tree.structure(how)

    assert structure(sampling(0.7, 0.9)) == structure(sampling(1.3, 0.5))
    assert structure(sampling()) != structure(sampling(0.7))
    assert structure(sampling(1.0)) != structure(sampling(1.0, 0.9))
    assert structure(sampling(1.0, top_k=2)) != structure(sampling(1.0, top_k=3))


# --- keys ---------------------------------------------------------------------------------------------


def test_uniforms_differ_between_seeds_positions_and_streams() -> None:
    """4 streams x 40 seeds x 40 positions: (seed 1, position 2) is not (2, 1), nor is stream 1 stream 2.
    Of 6,400 numbers of 23 bits a handful may be equal by chance."""
    seeds = jnp.arange(40, dtype=jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32), (40, 40))
    streams = (module.TARGET, module._PROPOSAL, module._TEST, module._RESIDUAL)
    values = [np.asarray(module.uniforms(seeds, positions, stream)) for stream in streams]
    assert all(((x >= 0) & (x < 1)).all() for x in values)
    assert len(np.unique(values)) > 4 * 40 * 40 - 20


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """Not on the row's place in a batch, the block around it or the other rows."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, V)), jnp.float32)
    seeds = jnp.asarray([7, 8, 9], jnp.int32)
    positions = jnp.asarray([[4, 5, 6, 7], [4, 5, 6, 7], [20, 21, 22, 23]], jnp.int32)
    how = sampling(1.5)
    whole = np.asarray(choose(logits, how, seeds, positions))
    for row in range(3):
        for node in range(4):
            alone = choose(
                logits[row : row + 1, node : node + 1], how, seeds[row : row + 1],
                positions[row : row + 1, node : node + 1],
            )  # fmt: skip
            assert int(alone[0, 0]) == whole[row, node]
    swapped = choose(logits[::-1], how, seeds[::-1], positions[::-1])
    np.testing.assert_array_equal(whole[::-1], swapped)


def test_draws_of_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of draws of a fair 4-sided die: each of the 16 pairs 1/16 (five sigma)."""
    n = 20_000
    logits = jnp.zeros((1, n, 4), jnp.float32)
    along = np.asarray(choose(logits, sampling(1.0), jnp.zeros(1, jnp.int32), jnp.arange(n)[None]))[0]
    positions = jnp.full((n, 1), 3, jnp.int32)
    across = np.asarray(choose(logits.reshape(n, 1, 4), sampling(1.0), jnp.arange(n), positions))[:, 0]
    proposed, _ = propose_samples(logits, sampling(1.0), jnp.zeros(1, jnp.int32), jnp.arange(n)[None])
    pairs = {
        "positions": (along[:-1], along[1:]),
        "seeds": (across[:-1], across[1:]),
        "streams": (along, np.asarray(proposed)[0]),
    }
    for name, (one, two) in pairs.items():
        counts = np.bincount(4 * one + two, minlength=16)
        expected = len(one) / 16
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected), (name, counts)


# --- walks --------------------------------------------------------------------------------------------


def greedy_logits(choices: list[list[int]]) -> jax.Array:
    return jax.nn.one_hot(jnp.asarray(choices), V)


NOBODY = jnp.zeros(2, jnp.int32)


def test_chain_stops_at_the_first_disagreement() -> None:
    """Row 1 disagrees at candidate 1, then agrees by accident: that does not count."""
    block = chain_block(jnp.asarray([[5, 1, 2, 3], [5, 1, 2, 3]], jnp.int32))
    logits = greedy_logits([[1, 2, 9, 4], [7, 2, 3, 4]])
    result = accept(block, logits, sampling(), NOBODY, block.depth)
    assert np.asarray(result.count).tolist() == [3, 1]
    assert np.asarray(result.tokens)[0, :3].tolist() == [1, 2, 9]
    assert np.asarray(result.tokens)[1, :1].tolist() == [7]
    assert np.asarray(result.path)[0, :3].tolist() == [0, 1, 2]


def test_whole_chain_accepted_yields_one_token_more() -> None:
    block = chain_block(jnp.asarray([[5, 1, 2, 3]] * 2, jnp.int32))
    result = accept(block, greedy_logits([[1, 2, 3, 4]] * 2), sampling(), NOBODY, block.depth)
    assert np.asarray(result.count).tolist() == [4, 4]
    assert np.asarray(result.tokens).tolist() == [[1, 2, 3, 4]] * 2


def test_tree_follows_the_child_that_the_target_chose() -> None:
    r"""      0:5          Row 0 walks 0 -> 2 -> 4 and then says 8; row 1 says 9 at the root, no child.
            /   \         Node 3 also agrees with its parent's choice (1), but 1 is not on the path.
          1:1   2:2
           |     |  \
          3:3   4:4  5:3
    """
    block = tree_block(
        jnp.asarray([[5, 1, 2, 3, 4, 3]] * 2, jnp.int32), jnp.asarray([[-1, 0, 0, 1, 2, 2]] * 2, jnp.int32)
    )
    logits = greedy_logits([[2, 3, 4, 6, 8, 7], [9, 3, 4, 6, 8, 7]])
    result = accept(block, logits, sampling(), NOBODY, block.depth)
    assert np.asarray(result.count).tolist() == [3, 1]
    assert np.asarray(result.path)[0, :3].tolist() == [0, 2, 4]
    assert np.asarray(result.tokens)[0, :3].tolist() == [2, 4, 8]
    assert np.asarray(result.tokens)[1, :1].tolist() == [9]


@pytest.mark.parametrize("padding_parent", [0, -1])
def test_padding_is_never_accepted(padding_parent: int) -> None:
    """Padding carries the very token that the target chose, under any parent."""
    valid = jnp.asarray([[True, True, False, False]] * 2)
    block = tree_block(
        jnp.asarray([[5, 1, 2, 2]] * 2, jnp.int32),
        jnp.asarray([[-1, 0, padding_parent, 1]] * 2, jnp.int32),
        valid,
    )
    result = accept(block, greedy_logits([[2, 2, 3, 3], [1, 2, 3, 3]]), sampling(), NOBODY, block.depth)
    assert np.asarray(result.count).tolist() == [1, 2]
    assert np.asarray(result.tokens)[0, :1].tolist() == [2]
    assert np.asarray(result.tokens)[1, :2].tolist() == [1, 2]


def test_rejection_with_a_certain_answer() -> None:
    """q proposes what p never says: always rejected, the residual is p. q equals p: always accepted."""
    p = jnp.asarray([0.5, 0.5, 0.0, 0.0])
    logits = jnp.broadcast_to(jnp.log(p), (2, 3, 4))
    block = chain_block(jnp.asarray([[0, 2, 3], [0, 0, 1]], jnp.int32))
    q = jnp.asarray([[[0, 0, 1, 0], [0, 0, 0, 1]], [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]]], jnp.float32)
    play = jax.jit(lambda seeds: accept(block, logits, sampling(1.0), seeds, block.depth + 1, q))
    for seed in range(30):
        result = play(jnp.full(2, seed, jnp.int32))
        assert np.asarray(result.count).tolist() == [1, 3]
        assert int(result.tokens[0, 0]) in (0, 1)
        assert np.asarray(result.tokens)[1, :2].tolist() == [0, 1]


def test_rejection_never_accepts_padding() -> None:
    """q of padding is 0: whatever is drawn, p of its token is not less. What follows is p's own token."""
    logits = jnp.log(jnp.asarray([[[0.5, 0.5, 0.0, 0.0]] * 3]))
    block = chain_block(jnp.asarray([[3, 0, 0]], jnp.int32), jnp.asarray([[True, True, False]]))
    q = jnp.asarray([[[0.5, 0.5, 0, 0], [0, 0, 0, 0]]], jnp.float32)
    result = accept(block, logits, sampling(1.0), NOBODY[:1], block.depth + 1, q)
    assert np.asarray(result.count).tolist() == [2]
    assert int(result.tokens[0, 0]) == 0 and int(result.tokens[0, 1]) in (0, 1)


def test_rejection_of_a_row_alone_is_rejection_in_a_batch() -> None:
    """Proposals, tests and residuals too are drawn by seed and position: a batch changes nothing."""
    rng, how = np.random.default_rng(5), sampling(1.0, 0.9)
    logits, q_logits = (jnp.asarray(rng.standard_normal((6, n, V)), jnp.float32) for n in (4, 3))
    seeds = jnp.arange(6, dtype=jnp.int32)
    positions = jnp.asarray(rng.integers(5, 50, (6, 1)), jnp.int32) + jnp.arange(4)[None]

    @jax.jit
    def play(logits, q_logits, seeds, positions):
        candidates, q = propose_samples(q_logits, how, seeds, positions[:, :3])
        block = chain_block(jnp.concatenate([candidates[:, :1], candidates], axis=1))
        result = accept(block, logits, how, seeds, positions, q)
        return candidates, result.count, result.tokens

    inputs = (logits, q_logits, seeds, positions)
    whole = play(*inputs)
    assert len(set(np.asarray(whole[1]).tolist())) > 1
    for row in range(6):
        alone = play(*(x[row : row + 1] for x in inputs))
        for together, mine in zip(whole, alone, strict=True):
            np.testing.assert_array_equal(together[row : row + 1], mine)
