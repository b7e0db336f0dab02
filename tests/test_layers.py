"""The shared maths against NumPy in float64 (tests/reference.py), and its rounding in bfloat16."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from dflash_jax.block import Block, chain_block, tree_block
from dflash_jax.cache import KVCache
from dflash_jax.config import RopeConfig
from dflash_jax.layers import (
    Linear,
    Masks,
    RMSNorm,
    SwiGLU,
    Table,
    attend,
    committed_mask,
    head_major,
    rope_frequencies,
    rotate,
    rotation,
    target_masks,
)

H = 16
ROPES = {
    "default": RopeConfig(1e4),
    "large_theta": RopeConfig(1e7),
    "linear": RopeConfig(1e4, "linear", factor=4.0),
    # Original length 64: the wavelengths 6 .. 20,000 fall on both sides and between.
    "llama3": RopeConfig(1e4, "llama3", factor=8.0, original_max_positions=64, low_freq_factor=1.0),
    "yarn": RopeConfig(1e4, "yarn", factor=4.0, original_max_positions=64),
    "yarn_untruncated": RopeConfig(1e4, "yarn", factor=4.0, original_max_positions=4096, truncate=False),
    "yarn_attention_factor": RopeConfig(
        1e4, "yarn", factor=4.0, original_max_positions=64, attention_factor=0.7
    ),
    "yarn_mscale": RopeConfig(
        1e4, "yarn", factor=40.0, original_max_positions=64, mscale=1.0, mscale_all_dim=0.7
    ),
    "yarn_factor_one": RopeConfig(1e4, "yarn", factor=1.0, original_max_positions=64),
    "divisors": RopeConfig(1e4, divisors=tuple(1.0 + i for i in range(H // 2))),
}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- rotary positions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies(name: str) -> None:
    inverse, factor = rope_frequencies(ROPES[name], H)
    expected, expected_factor = reference.inverse_frequencies(ROPES[name], H)
    assert inverse.dtype == np.float32
    np.testing.assert_allclose(inverse, expected, rtol=2e-6)
    assert factor == pytest.approx(expected_factor, rel=1e-9)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "yarn_mscale", "divisors"])
def test_scaling_is_not_the_default(name: str) -> None:
    """Else the check above would pass with the branch missing on both sides."""
    plain, _ = reference.inverse_frequencies(ROPES["default"], H)
    scaled, _ = reference.inverse_frequencies(ROPES[name], H)
    assert (np.abs(scaled / plain - 1) > 0.1).any()
    if name in ("llama3", "yarn"):
        ratio = plain / scaled
        assert ratio.min() == pytest.approx(1) and ratio.max() == pytest.approx(ROPES[name].factor)
        assert ((ratio > 1.01) & (ratio < ROPES[name].factor - 0.01)).any(), "no frequency is blended"


def test_yarn_factors_by_hand() -> None:
    assert rope_frequencies(ROPES["yarn"], H)[1] == pytest.approx(0.1 * np.log(4) + 1)
    assert rope_frequencies(ROPES["yarn_attention_factor"], H)[1] == 0.7
    assert rope_frequencies(ROPES["yarn_factor_one"], H)[1] == 1.0


@pytest.mark.parametrize("name", ["default", "llama3", "yarn_mscale", "divisors"])
def test_rotate(name: str) -> None:
    x, positions = normal(0, 2, 5, 3, H), np.array([[0, 1, 2, 3, 4], [7, 8, 9, 100, 1000]], np.int32)
    turned = rotate(jnp.asarray(x), rotation(ROPES[name], H, jnp.asarray(positions)))
    for row in range(2):
        expected = reference.rotate(x[row].astype(np.float64), positions[row], ROPES[name])
        np.testing.assert_allclose(turned[row], expected, atol=3e-4)  # float32 angles of position 1000


def test_rotation_of_scores_depends_on_distance_only() -> None:
    q, k = jnp.asarray(normal(1, 1, 1, 1, H)), jnp.asarray(normal(2, 1, 1, 1, H))

    def score(at: int, other: int) -> float:
        turn = [rotation(ROPES["default"], H, jnp.full((1, 1), p, jnp.int32)) for p in (at, other)]
        return float((rotate(q, turn[0]) * rotate(k, turn[1])).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


# --- attention ----------------------------------------------------------------------------------------

N, K, T, S = 4, 2, 5, 12
LENGTHS = np.array([0, 7], np.int32)  # nothing committed; part of the slots committed


def attention_inputs(seed: int = 3) -> tuple[np.ndarray, ...]:
    shapes = [(2, T, N, H), (2, T, K, H), (2, T, K, H), (2, S, K, H), (2, S, K, H)]
    return tuple(normal(seed + i, *shape) for i, shape in enumerate(shapes))


def blocks() -> dict[str, Block]:
    tokens = jnp.zeros((2, T), jnp.int32)
    parents = jnp.asarray([[-1, 0, 0, 1, 2], [-1, 0, 1, 1, 3]], jnp.int32)
    valid = jnp.asarray([[True] * 5, [True, True, True, False, False]])
    return {"chain": chain_block(tokens), "tree": tree_block(tokens, parents),
            "padded": chain_block(tokens, valid)}  # fmt: skip


def attend_all(q, k, v, old_k, old_v, masks: Masks) -> jax.Array:
    new = KVCache(head_major(jnp.asarray(k)), head_major(jnp.asarray(v)))
    cache = KVCache(head_major(jnp.asarray(old_k)), head_major(jnp.asarray(old_v)))
    return attend(jnp.asarray(q), new, cache, masks)


def dense_mask(block: Block, row: int, window: int | None) -> np.ndarray:
    """[T, length + T] for one row, pair by pair, from parents and valid."""
    length, parents = int(LENGTHS[row]), np.asarray(block.parents[row])
    valid, depth = np.asarray(block.valid[row]), []
    for i in range(T):
        depth.append(0 if parents[i] < 0 else depth[parents[i]] + 1)

    def up(node: int) -> list[int]:
        return [node] if parents[node] < 0 else [node, *up(int(parents[node]))]

    def near(distance: int) -> bool:
        return window is None or distance < window

    mask = np.zeros((T, length + T), bool)
    for i in range(T):
        for slot in range(length):
            mask[i, slot] = near(length + depth[i] - slot)
        for j in up(i):
            mask[i, length + j] = (valid[j] or j == i) and near(depth[i] - depth[j])
    return mask


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("kind", ["chain", "tree", "padded"])
def test_attention(kind: str, window: int | None) -> None:
    """Grouped heads over committed slots and block rows equal one dense softmax per head."""
    q, k, v, old_k, old_v = attention_inputs()
    block = blocks()[kind]
    masks = target_masks(block, jnp.asarray(LENGTHS), S, window)
    out = attend_all(q, k, v, old_k, old_v, masks)
    for row, length in enumerate(LENGTHS):
        keys = np.concatenate([old_k[row, :length], k[row]]).astype(np.float64)
        values = np.concatenate([old_v[row, :length], v[row]]).astype(np.float64)
        expected = reference.attention(
            q[row].astype(np.float64), keys, values, dense_mask(block, row, window)
        )
        np.testing.assert_allclose(out[row], expected, atol=2e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_slots_beyond_the_length_may_hold_anything_finite(window: int | None) -> None:
    q, k, v, old_k, old_v = attention_inputs()
    masks = target_masks(blocks()["chain"], jnp.asarray(LENGTHS), S, window)
    clean = attend_all(q, k, v, old_k, old_v, masks)
    for garbage in (7.0, 1e30, -1e30):
        dirty_k, dirty_v = old_k.copy(), old_v.copy()
        for row, length in enumerate(LENGTHS):
            dirty_k[row, length:] = dirty_v[row, length:] = garbage
        np.testing.assert_array_equal(clean, attend_all(q, k, v, dirty_k, dirty_v, masks))


def test_committed_mask_without_a_window_is_one_row() -> None:
    positions = jnp.asarray(LENGTHS)[:, None] + jnp.arange(T)[None]
    assert committed_mask(jnp.asarray(LENGTHS), positions, S, None).shape == (2, 1, S)
    assert committed_mask(jnp.asarray(LENGTHS), positions, S, 3).shape == (2, T, S)


def test_attention_in_bfloat16() -> None:
    """200 equal weights of ones sum to 1: the steps of a bfloat16 sum would be off by a fifth."""
    slots = 200
    rows = jnp.ones((1, 1, 1, H), jnp.bfloat16)
    cache = KVCache(jnp.zeros((1, 1, slots, H), jnp.bfloat16), jnp.ones((1, 1, slots, H), jnp.bfloat16))
    new = KVCache(jnp.zeros((1, 1, 1, H), jnp.bfloat16), jnp.ones((1, 1, 1, H), jnp.bfloat16))
    masks = target_masks(chain_block(jnp.zeros((1, 1), jnp.int32)), jnp.asarray([slots]), slots, None)
    out = attend(rows, new, cache, masks)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, atol=0.008)


# --- the rest -----------------------------------------------------------------------------------------


def run(module: nn.Module, params: dict, x: np.ndarray, dtype=jnp.float32) -> jax.Array:
    cast = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
    return module.apply({"params": cast}, jnp.asarray(x, dtype))


def test_rms_norm() -> None:
    x, weight = normal(4, 2, 3, 8), 1 + normal(5, 8)
    out = run(RMSNorm(0.3), {"weight": weight}, x)
    np.testing.assert_allclose(out, reference.rms_norm(x.astype(np.float64), weight, 0.3), rtol=1e-5)


def test_rms_norm_rounds_before_the_weight() -> None:
    """Llama, Qwen2, Qwen3 and the draft: w * x.astype(dtype), which differs from (w * x).astype(dtype)."""
    x, weight = normal(6, 1, 40, 8), 1 + normal(7, 8)
    out = np.asarray(run(RMSNorm(1e-6), {"weight": weight}, x, jnp.bfloat16), np.float32)

    def bf16(y: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(y, jnp.bfloat16), np.float32)

    normed = reference.rms_norm(bf16(x).astype(np.float64), np.ones(8), 1e-6).astype(np.float32)
    np.testing.assert_array_equal(out, bf16(bf16(normed) * bf16(weight)))
    assert (out != bf16(normed * bf16(weight))).any(), "the two orders do not differ on this input"


@pytest.mark.parametrize("use_bias", [False, True])
def test_linear(use_bias: bool) -> None:
    x, params = (
        normal(8, 2, 3, 5),
        {"weight": normal(9, 7, 5)} | ({"bias": normal(10, 7)} if use_bias else {}),
    )
    out = run(Linear(7, use_bias), params, x)
    np.testing.assert_allclose(out, reference.linear(params, x.astype(np.float64)), atol=1e-5)


def test_linear_in_bfloat16_adds_the_bias_in_float32() -> None:
    """bfloat16 steps by 2^-7 above 1: 1 + 2^-9 alone is rounded to 1, and so is 1 + 1.5 * 2^-9, but all
    together is more than half a step."""
    x, weight = np.asarray([[[1, 2.0**-9]]], np.float32), np.ones((1, 2), np.float32)
    out = run(Linear(1, True), {"weight": weight, "bias": np.full(1, 1.5 * 2.0**-9)}, x, jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 0, 0]) == 1 + 2.0**-7


def test_swiglu() -> None:
    x = normal(11, 2, 3, 5)
    params = {
        name: {"weight": normal(i, *shape), "bias": normal(i + 3, shape[0])}
        for i, (name, shape) in enumerate(
            {"gate_proj": (7, 5), "up_proj": (7, 5), "down_proj": (5, 7)}.items(), start=12
        )
    }
    out = run(SwiGLU(7, True), params, x)
    np.testing.assert_allclose(out, reference.mlp(params, x.astype(np.float64)), rtol=1e-4, atol=1e-4)


def test_table_embeds_and_scores() -> None:
    weight = normal(20, 6, 4)
    params = {"params": {"weight": jnp.asarray(weight)}}
    tokens = jnp.asarray([[5, 0, 3]], jnp.int32)
    embedded = Table(6, 4).apply(params, tokens, method="embed")
    np.testing.assert_array_equal(embedded, weight[[[5, 0, 3]]])
    scores = Table(6, 4).apply(params, embedded, method="head")
    np.testing.assert_allclose(scores, np.asarray(embedded) @ weight.T, atol=1e-5)


def test_head_in_bfloat16_gives_float32_logits() -> None:
    params = {"params": {"weight": jnp.ones((2, 301), jnp.bfloat16)}}
    scores = Table(2, 301).apply(params, jnp.ones((1, 1, 301), jnp.bfloat16), method="head")
    assert scores.dtype == jnp.float32
    assert float(scores[0, 0, 0]) == 301.0  # no bfloat16: these are even between 256 and 512
