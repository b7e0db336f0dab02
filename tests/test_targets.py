"""Every family against NumPy in float64: chains, trees, taps, windows, rotary types (cases 15, 18, 36).

The same comparison with transformers is in tests/parity.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from dflash_jax import targets, testing
from dflash_jax.block import Block, chain_block, tree_block
from dflash_jax.cache import RecurrentState, States, Tape, TargetCache, commit, target_cache
from dflash_jax.config import FULL, RECURRENT, SLIDING, RopeConfig, TargetConfig
from dflash_jax.targets import TargetOutput, make_target

B, T, SLOTS = 2, 6, 16
TAPS = (1, 0)  # not in layer order, and the last layer first
SLIDE = {"layer_types": (FULL, SLIDING), "sliding_window": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 sliding, yarn": {**SLIDE, "rope": RopeConfig(1e4, "yarn", 4.0, original_max_positions=64)},
    "llama": {"family": "llama"},
    "llama untied, all biases": {
        "family": "llama", "tie_word_embeddings": False, "attention_bias": True,
        "attention_out_bias": True, "mlp_bias": True, "num_kv_heads": 4,
    },
    "llama3 rope": {"family": "llama", "rope": RopeConfig(1e4, "llama3", 8.0, original_max_positions=64)},
    "qwen2 sliding": {"family": "qwen2", **SLIDE},
    "qwen3_5": {"family": "qwen3_5"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "qwen3_5_moe": {"family": "qwen3_5_moe"},
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, testing.VOCAB, (B, 2 * T)).astype(np.int32)
PARENTS = np.array([[-1, 0, 0, 1, 3, 2], [-1, 0, 1, 1, 0, 4]], np.int32)


def config_of(name: str) -> TargetConfig:
    return testing.target_config(**VARIANTS[name])


@functools.cache
def params_of(config: TargetConfig) -> dict:
    return testing.random_params(targets.abstract_params(config), seed=4)


@functools.partial(jax.jit, static_argnames=("config", "logits"))
def forward(
    config: TargetConfig, params: dict, block: Block, cache: TargetCache, logits: str | None = "all"
) -> TargetOutput:
    return make_target(config).apply({"params": params}, block, cache, TAPS, logits)


def first_half(config: TargetConfig, dtype=jnp.float32) -> TargetOutput:
    params = jax.tree.map(lambda x: x.astype(dtype), params_of(config))
    return forward(
        config, params, chain_block(jnp.asarray(TOKENS[:, :T])), target_cache(config, B, SLOTS, dtype)
    )


def committed(config: TargetConfig) -> TargetCache:
    path = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    empty = target_cache(config, B, SLOTS, jnp.float32)
    return commit(empty, first_half(config).trail, path, jnp.full(B, T, jnp.int32))


def tree() -> Block:
    return tree_block(jnp.asarray(TOKENS[:, T:]), jnp.asarray(PARENTS))


def root_path(row: int, node: int) -> list[int]:
    return [] if node < 0 else [*root_path(row, int(PARENTS[row, node])), node]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_chain(name: str) -> None:
    """Logits and tapped states of every position; the last layer's tap is what the final norm reads."""
    config = config_of(name)
    output = first_half(config)
    for row in range(B):
        logits, after = reference.target(config, params_of(config), TOKENS[row, :T].tolist())
        np.testing.assert_allclose(output.logits[row], logits, atol=2e-4)
        np.testing.assert_allclose(
            output.features[row], reference.features(after, TAPS), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_a_tree_on_a_context(name: str) -> None:
    """Each node's logits are those of its own root path after the committed tokens."""
    config = config_of(name)
    output = forward(config, params_of(config), tree(), committed(config))
    for row in range(B):
        for node in range(T):
            text = [*TOKENS[row, :T].tolist(), *(int(TOKENS[row, T + n]) for n in root_path(row, node))]
            logits, after = reference.target(config, params_of(config), text)
            np.testing.assert_allclose(output.logits[row, node], logits[-1], atol=3e-4)
            last = reference.features(after, TAPS)[-1]
            np.testing.assert_allclose(output.features[row, node], last, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3", "qwen2 sliding"])
def test_every_variant_says_something_else(name: str) -> None:
    """Else a branch that is missing on both sides would pass: windows, biases and scaling have effect."""
    config = config_of(name)
    plain, _ = reference.target(config, params_of(config), TOKENS[0].tolist())
    for changes in (
        {"layer_types": (SLIDING, SLIDING), "sliding_window": 3},
        {"rope": RopeConfig(1e4, "linear", 4.0)},
    ):
        changed = testing.target_config(**{**VARIANTS[name], **changes})
        other, _ = reference.target(changed, params_of(config), TOKENS[0].tolist())
        assert np.abs(plain - other)[-1].max() > 0.1


def test_padding_changes_nothing() -> None:
    """Whatever token, NaN embedding or place in the tree a padding node has."""
    config = config_of("qwen3")
    params, cache = params_of(config), committed(config)
    valid = jnp.asarray([[True] * 4 + [False] * 2, [True] * 2 + [False] * 4])
    block = chain_block(jnp.asarray(TOKENS[:, T:]), valid)
    clean = forward(config, params, block, cache)
    tokens = jnp.where(valid, block.tokens, (block.tokens + 1) % testing.VOCAB)
    dirty = forward(config, params, block.replace(tokens=tokens), cache)
    embeddings = params["embed_tokens"]["weight"][tokens]
    poisoned = jnp.where(valid[:, :, None], embeddings, jnp.nan)
    run = jax.jit(
        lambda block, cache, x: make_target(config).apply({"params": params}, block, cache, embeddings=x)
    )
    nan = run(block, cache, poisoned)
    for row, count in enumerate((4, 2)):
        np.testing.assert_array_equal(clean.logits[row, :count], dirty.logits[row, :count])
        np.testing.assert_allclose(clean.logits[row, :count], nan.logits[row, :count], atol=1e-5)
        for a, b in zip(clean.trail, nan.trail, strict=True):
            np.testing.assert_allclose(a.k[row, :, :count], b.k[row, :, :count], atol=1e-5)
    assert np.isfinite(dirty.logits).all() and np.isfinite(nan.logits).all()


def test_last_logits_are_those_of_the_last_valid_row() -> None:
    config = config_of("qwen3")
    params, cache = params_of(config), committed(config)
    counts = np.array([4, 1])
    block = chain_block(jnp.asarray(TOKENS[:, T:]), jnp.arange(T)[None] < jnp.asarray(counts)[:, None])
    whole = forward(config, params, block, cache)
    last = forward(config, params, block, cache, "last")
    assert last.logits.shape == (B, 1, testing.VOCAB)
    for row, count in enumerate(counts):
        np.testing.assert_allclose(last.logits[row, 0], whole.logits[row, count - 1], atol=1e-5)


def test_logits_are_optional() -> None:
    config = config_of("qwen3")
    block = chain_block(jnp.asarray(TOKENS[:, T:]))
    output = jax.eval_shape(
        lambda: make_target(config).apply(
            {"params": params_of(config)}, block, target_cache(config, B, SLOTS, jnp.float32), (), None
        )
    )
    assert output.logits is None
    assert output.features.shape == (B, T, 0)
    assert len(output.trail) == config.num_layers


def test_bfloat16_weights_stay_bfloat16() -> None:
    """States, trail and features are bfloat16, logits float32, and near the float32 ones."""
    config = config_of("qwen3")
    output, exact = first_half(config, jnp.bfloat16), first_half(config)
    assert output.logits.dtype == jnp.float32
    assert output.features.dtype == jnp.bfloat16
    assert all(rows.k.dtype == rows.v.dtype == jnp.bfloat16 for rows in output.trail)
    gap = np.abs(np.asarray(output.logits) - np.asarray(exact.logits)).mean()
    assert gap < 0.1 * np.asarray(exact.logits).std()


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("qwen3_5")])
def test_parameter_names_are_hugging_faces(name: str) -> None:
    config = config_of(name)
    tree = targets.abstract_params(config)
    layer = tree["layers_1"]["self_attn"]
    assert set(tree) == {"embed_tokens", "layers_0", "layers_1", "norm"} | (
        set() if config.tie_word_embeddings else {"lm_head"}
    )
    norms = {"q_norm", "k_norm"} if config.family in ("qwen3", "qwen3_moe") else set()
    assert set(layer) == {"q_proj", "k_proj", "v_proj", "o_proj"} | norms
    assert layer["q_proj"]["weight"].shape == (64, 32) and layer["o_proj"]["weight"].shape == (32, 64)
    assert ("bias" in layer["k_proj"]) == config.attention_bias
    assert ("bias" in layer["o_proj"]) == config.attention_out_bias
    assert ("bias" in tree["layers_0"]["mlp"]["up_proj"]) == config.mlp_bias


def test_parameter_names_of_a_hybrid_are_hugging_faces() -> None:
    """Also their shapes: a checkpoint is read as it is."""
    config = config_of("qwen3_5")
    tree, r = targets.abstract_params(config), config.recurrent
    assert r is not None
    assert set(tree) == {"embed_tokens", *(f"layers_{i}" for i in range(4)), "norm", "lm_head"}
    for i, kind in enumerate(config.layer_types):
        mixer = "linear_attn" if kind == RECURRENT else "self_attn"
        assert set(tree[f"layers_{i}"]) == {"input_layernorm", mixer, "post_attention_layernorm", "mlp"}
    attention, delta = tree["layers_1"]["self_attn"], tree["layers_0"]["linear_attn"]
    assert set(attention) == {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    assert attention["q_proj"]["weight"].shape == (2 * 64, 32)
    projections = {"in_proj_qkv": 92, "in_proj_z": 60, "in_proj_a": 6, "in_proj_b": 6}
    assert set(delta) == {*projections, "conv1d", "A_log", "dt_bias", "norm", "out_proj"}
    assert {name: delta[name]["weight"].shape for name in projections} == {
        name: (rows, 32) for name, rows in projections.items()
    }
    assert delta["conv1d"]["weight"].shape == (92, 1, 4) and r.channels == 92
    assert delta["A_log"].shape == delta["dt_bias"].shape == (6,)
    assert delta["norm"]["weight"].shape == (10,) and delta["out_proj"]["weight"].shape == (32, 60)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_parameter_names_of_experts_are_hugging_faces(name: str) -> None:
    """As transformers 5 holds them: fused, gate before up."""
    config = config_of(name)
    tree, moe = targets.abstract_params(config), config.moe
    assert moe is not None
    shared = {"shared_expert", "shared_expert_gate"} if moe.shared_intermediate_size else set()
    for i, routed in enumerate(moe.layers):
        mlp = tree[f"layers_{i}"]["mlp"]
        dense = {"gate_proj", "up_proj", "down_proj"}
        assert set(mlp) == ({"gate", "experts"} | shared if routed else dense)
    assert mlp["gate"]["weight"].shape == (5, 32)
    assert {name: leaf.shape for name, leaf in mlp["experts"].items()} == {
        "gate_up_proj": (5, 24, 32),
        "down_proj": (5, 32, 12),
    }
    if shared:
        assert mlp["shared_expert"]["up_proj"]["weight"].shape == (20, 32)
        assert mlp["shared_expert_gate"]["weight"].shape == (1, 32)


def test_bfloat16_weights_keep_a_float32_state() -> None:
    """Case 23: what a delta layer leaves behind, and carries, is float32; only its inputs are rounded."""
    config = config_of("qwen3_5")
    output, exact = first_half(config, jnp.bfloat16), first_half(config)
    path = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    cache = jax.jit(commit)(
        target_cache(config, B, SLOTS, jnp.bfloat16), output.trail, path, jnp.full(B, T, jnp.int32)
    )
    tape, state = output.trail[0], cache.layers[0]
    assert isinstance(tape, Tape) and isinstance(state, RecurrentState)
    assert tape.k.dtype == tape.delta.dtype == tape.decay.dtype == state.s.dtype == jnp.float32
    assert tape.conv.dtype == state.conv.dtype == output.features.dtype == jnp.bfloat16
    gap = np.abs(np.asarray(output.logits) - np.asarray(exact.logits)).mean()
    assert gap < 0.1 * np.asarray(exact.logits).std()


def test_a_hybrid_leaves_states_when_asked() -> None:
    """Committing any count from saved states or from the tape gives one cache."""
    config = config_of("qwen3_5")
    cache, block = committed(config), tree()
    run = jax.jit(make_target(config).apply, static_argnames=("taps", "logits", "trail"))
    trails = [
        run({"params": params_of(config)}, block, cache, trail=kind).trail for kind in ("tape", "states")
    ]
    assert isinstance(trails[1][0], States)
    select = jax.jit(commit)
    for node in range(T):
        paths = [root_path(row, node) for row in range(B)]
        filled = jnp.asarray([path + [0] * (T - len(path)) for path in paths], jnp.int32)
        count = jnp.asarray([len(path) for path in paths], jnp.int32)
        one, other = (select(cache, trail, filled, count).layers[0] for trail in trails)
        assert isinstance(one, RecurrentState) and isinstance(other, RecurrentState)
        np.testing.assert_allclose(one.s, other.s, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(one.conv, other.conv)
