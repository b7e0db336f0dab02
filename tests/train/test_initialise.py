"""A draft that starts as the target's last layers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TARGET, draft_config

from dflash_jax import testing
from dflash_jax.config import ConfigError
from dflash_jax.drafts import DFlash, abstract_params
from dflash_jax.layers import rotation
from dflash_jax.targets import init_params as init_target
from dflash_jax.targets import make_target
from train.initialise import from_target
from train.step import tapped

DRAFT = draft_config(taps=(0, 2), num_layers=1)
TOKENS = np.random.default_rng(0).integers(4, 64, (2, 20))


def target_params() -> dict:
    """Random, with gains that are not 1: folding them must matter."""
    params = init_target(TARGET, jax.random.key(0))
    return jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x + jnp.linspace(-0.5, 0.5, x.size), params)


def test_has_the_shape_of_a_draft() -> None:
    made = from_target(make_target(TARGET), target_params(), DRAFT, TOKENS)
    wanted = abstract_params(DRAFT)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(lambda x: x.shape, wanted)


def test_context_rows_are_the_targets_own_values_and_directions() -> None:
    """The draft's only layer is the target's layer 3, which reads layer 2's output: the last tap."""
    target, params = make_target(TARGET), target_params()
    made = jax.tree.map(jnp.asarray, from_target(target, params, DRAFT, TOKENS))
    tokens = jnp.asarray(TOKENS, jnp.int32)
    features = tapped(target, params, tokens, DRAFT.taps)
    positions = jnp.broadcast_to(jnp.arange(20), (2, 20))
    rows = DFlash(DRAFT).apply({"params": made}, features, positions, method="context_rows")[0]

    layer = params["layers_3"]
    entering = np.asarray(tapped(target, params, tokens, (2,)), np.float64)
    normed = entering / np.sqrt((entering**2).mean(-1, keepdims=True) + TARGET.rms_norm_eps)
    normed = normed * np.asarray(layer["input_layernorm"]["weight"])
    values = (normed @ np.asarray(layer["self_attn"]["v_proj"]["weight"]).T).reshape(2, 20, 2, 8)
    np.testing.assert_allclose(rows.v, values.swapaxes(1, 2), rtol=1e-4, atol=1e-5)

    keys = (normed @ np.asarray(layer["self_attn"]["k_proj"]["weight"]).T).reshape(2, 20, 2, 8)
    size = np.sqrt((keys**2).mean())
    keys = keys / np.sqrt((keys**2).mean(-1, keepdims=True)) * size  # the draft's norm, at the typical size
    turn = rotation(TARGET.rope, 8, positions)
    half = np.split(keys, 2, axis=-1)
    turned = [half[0] * turn.cos - half[1] * turn.sin, half[1] * turn.cos + half[0] * turn.sin]
    expected = np.concatenate(turned, axis=-1).swapaxes(1, 2)
    np.testing.assert_allclose(rows.k, expected, rtol=1e-3, atol=1e-4)


def test_a_target_with_its_own_head_norms_keeps_them() -> None:
    config = dataclasses.replace(TARGET, family="qwen3")
    params = init_target(config, jax.random.key(1))
    params["layers_3"]["self_attn"]["q_norm"]["weight"] = jnp.arange(8.0)
    made = from_target(make_target(config), params, DRAFT, TOKENS)
    np.testing.assert_array_equal(made["layers_0"]["self_attn"]["q_norm"]["weight"], np.arange(8.0))


@pytest.mark.parametrize("change", [{"intermediate_size": 40}, {"num_layers": 5}, {"attention_bias": True}])
def test_other_shapes_are_refused(change: dict) -> None:
    with pytest.raises(ConfigError, match=r"copied|fewer than"):
        from_target(make_target(TARGET), target_params(), draft_config(**change), TOKENS)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_moe"])
def test_layers_that_a_draft_cannot_have_are_not_copied(family: str) -> None:
    config = testing.target_config(family)
    draft = testing.draft_config(config, num_layers=1, intermediate_size=config.intermediate_size)
    with pytest.raises(ConfigError, match=rf"last 1 \({family}: .* set model\.start to random"):
        from_target(make_target(config), {}, draft, TOKENS)
