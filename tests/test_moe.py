"""Routed experts against plain NumPy, one token and one expert at a time: all three ways to run them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from dflash_jax import moe
from dflash_jax.moe import Routing, route, run_experts

WAYS: dict[str, Callable[..., Array]] = {"gathered": moe.gathered, "ragged": moe.ragged, "tiled": moe.tiled}
HIDDEN, WIDTH = 12, 7


def weights(experts: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    gate_up = rng.standard_normal((experts, 2 * WIDTH, HIDDEN)) / np.sqrt(HIDDEN)
    down = rng.standard_normal((experts, HIDDEN, WIDTH)) / np.sqrt(WIDTH)
    return jnp.asarray(gate_up, jnp.float32), jnp.asarray(down, jnp.float32)


def tokens(count: int, seed: int = 1) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, HIDDEN)), jnp.float32)


def routing(count: int, experts: int, per_token: int, seed: int = 2) -> tuple[Array, Array]:
    """Different experts for each token, few of them popular, some unused; any weights."""
    rng = np.random.default_rng(seed)
    popular = rng.dirichlet(np.full(experts, 0.5)) + 1e-9
    popular = popular / popular.sum()
    chosen = [rng.choice(experts, per_token, replace=False, p=popular) for _ in range(count)]
    return jnp.asarray(np.array(chosen), jnp.int32), jnp.asarray(
        rng.uniform(0.1, 1, (count, per_token)), jnp.float32
    )


def by_hand(x: Array, chosen: Array, weight: Array, gate_up: Array, down: Array) -> np.ndarray:
    inputs, weights, into, back = (np.asarray(a, np.float64) for a in (x, weight, gate_up, down))
    out = np.zeros_like(inputs)
    for t, experts in enumerate(np.asarray(chosen)):
        for e, w in zip(experts, weights[t], strict=True):
            gate, up = into[e, :WIDTH] @ inputs[t], into[e, WIDTH:] @ inputs[t]
            out[t] += w * (back[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("count", "experts", "per_token"),
    # one token; fewer pairs than experts; one more than a tile; several tiles an expert; all experts
    # for all tokens; one expert
    [(1, 6, 2), (3, 40, 2), (17, 6, 1), (100, 6, 3), (20, 4, 4), (9, 1, 1)],
)
def test_every_way_is_the_same_sum(way: str, count: int, experts: int, per_token: int) -> None:
    x, parts, to = tokens(count), weights(experts), routing(count, experts, per_token)
    np.testing.assert_allclose(jax.jit(WAYS[way])(x, *to, *parts), by_hand(x, *to, *parts), atol=2e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("expert", [0, 3, 5])
def test_all_tokens_of_one_expert(way: str, expert: int) -> None:
    """The most uneven routing: all pairs in one group, first, middle or last, the other groups empty."""
    x, parts = tokens(50), weights(6)
    to = jnp.full((50, 1), expert, jnp.int32), jnp.ones((50, 1), jnp.float32)
    np.testing.assert_allclose(jax.jit(WAYS[way])(x, *to, *parts), by_hand(x, *to, *parts), atol=2e-5)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_touch_each_other(way: str) -> None:
    """What one token holds, NaN included, changes no other token's output."""
    x, parts, to = tokens(20), weights(6), routing(20, 6, 2)
    run = jax.jit(WAYS[way])
    others = np.arange(20) != 7
    clean, spoiled = run(x, *to, *parts), run(x.at[7].set(jnp.nan), *to, *parts)
    np.testing.assert_allclose(clean[others], spoiled[others], atol=1e-6)
    assert np.isnan(spoiled[7]).all()


@pytest.mark.parametrize("way", ["ragged", "tiled"])
def test_gradients_are_those_of_gathered(way: str) -> None:
    """A tiny target of this kind can be trained: for tokens, routing weights and experts."""
    x, parts, (chosen, weight) = tokens(20), weights(6), routing(20, 6, 2)

    def loss(run: Callable[..., Array]) -> Callable[..., Array]:
        return lambda x, weight, *parts: jnp.sin(run(x, chosen, weight, *parts)).sum()

    ours = jax.jit(jax.grad(loss(WAYS[way]), (0, 1, 2, 3)))(x, weight, *parts)
    theirs = jax.jit(jax.grad(loss(moe.gathered), (0, 1, 2, 3)))(x, weight, *parts)
    for a, b in zip(ours, theirs, strict=True):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("normalise", [False, True])
def test_routing_takes_the_heaviest_of_the_softmax_over_all(normalise: bool) -> None:
    logits = 2 * np.random.default_rng(3).standard_normal((2, 5, 9)).astype(np.float32)
    to = route(jnp.asarray(logits), 3, normalise)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for b, t in np.ndindex(2, 5):
        heaviest = np.argsort(-probs[b, t])[:3]
        expected = probs[b, t, heaviest] / (probs[b, t, heaviest].sum() if normalise else 1)
        np.testing.assert_array_equal(to.experts[b, t], heaviest)
        np.testing.assert_allclose(to.weights[b, t], expected, rtol=1e-5)


def test_routing_of_bfloat16_logits_is_float32() -> None:
    """Rounded weights would no longer sum to 1."""
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((1, 4, 9)), jnp.bfloat16)
    to = route(logits, 3, normalise=True)
    assert to.weights.dtype == jnp.float32
    np.testing.assert_allclose(to.weights.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_run_experts_keeps_shape_and_dtype(dtype: jnp.dtype) -> None:
    x, parts, (chosen, weight) = tokens(10), weights(6), routing(10, 6, 2)
    expected = by_hand(x, chosen, weight, *parts).reshape(2, 5, HIDDEN)
    to = Routing(chosen.reshape(2, 5, 2), weight.reshape(2, 5, 2))
    y = jax.jit(run_experts)(
        x.reshape(2, 5, HIDDEN).astype(dtype), to, *(part.astype(dtype) for part in parts)
    )
    assert y.dtype == dtype and y.shape == (2, 5, HIDDEN)
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=2e-5 if dtype == jnp.float32 else 0.1)


@pytest.mark.parametrize(("count", "expected"), [(2, "gather"), (20, "ragged_dot")])
def test_other_devices_than_cpus_gather_for_few_tokens_only(count: int, expected: str) -> None:
    """Read from the program that a GPU would get: a copy of the experts in use, or one ragged_dot."""
    x, parts, (chosen, weight) = tokens(count), weights(40), routing(count, 40, 3)
    to = Routing(chosen[None], weight[None])
    program = jax.jit(run_experts).trace(x[None], to, *parts)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert ("ragged_dot" in text) == (expected == "ragged_dot")
    assert "while" not in text and "scan" not in text
    assert "ragged_dot" not in program.lower(lowering_platforms=("cpu",)).as_text()
