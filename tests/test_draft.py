"""The draft against NumPy in float64, and what it may see (cases 17-19, 28, 29)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from decoding import BLOCKS, BUDGET, PROMPTS, assert_caches_close, pair

from dflash_jax import decode, drafts, stepwise, testing
from dflash_jax.cache import DraftCache, draft_cache
from dflash_jax.config import FULL, SLIDING, DraftConfig, RopeConfig
from dflash_jax.drafts import DFlash
from dflash_jax.generation import finish

B, C, ROWS, SLOTS, WINDOW = 2, 6, 11, 24, 5
COUNT = np.array([11, 3], np.int32)  # a context longer than the window, and one that is shorter
BOTH = (SLIDING, SLIDING)
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": (True, True)},
    "sliding": {"layer_types": BOTH, "sliding_window": WINDOW},
    "sliding, bidirectional": {"layer_types": BOTH, "sliding_window": WINDOW, "causal": (False, False)},
    "mixed": {"layer_types": (SLIDING, FULL), "sliding_window": 2, "causal": (False, True)},
    "biased, scaled, yarn": {
        "attention_bias": True, "embedding_scale": 2.5, "num_kv_heads": 4,
        "rope": RopeConfig(1e4, "yarn", 4.0, original_max_positions=64),
    },
    "three taps, two layers": {"taps": (0, 2, 1), "num_target_layers": 3},
}  # fmt: skip


def config_of(name: str) -> DraftConfig:
    return testing.draft_config(testing.target_config(), **VARIANTS[name])


@functools.cache
def params_of(config: DraftConfig) -> dict:
    return testing.random_params(drafts.abstract_params(config), seed=6)


def inputs(config: DraftConfig, seed: int = 8) -> tuple[jax.Array, jax.Array]:
    """Features [B, ROWS, P * D] and embeddings [B, C, D]."""
    rng = np.random.default_rng(seed)
    shapes = (B, ROWS, len(config.taps) * config.hidden_size), (B, C, config.hidden_size)
    features, embeddings = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    return features, embeddings


@functools.partial(jax.jit, static_argnames="config")
def extend(config: DraftConfig, params: dict, cache: DraftCache, features, count) -> DraftCache:
    return DFlash(config).apply({"params": params}, cache, features, count, method="extend")


@functools.partial(jax.jit, static_argnames="config")
def propose(config: DraftConfig, params: dict, cache: DraftCache, embeddings) -> jax.Array:
    return DFlash(config).apply({"params": params}, cache, embeddings, method="propose")


def run(config: DraftConfig, features, embeddings) -> jax.Array:
    params, empty = params_of(config), draft_cache(config, B, SLOTS, jnp.float32)
    return propose(config, params, extend(config, params, empty, features, jnp.asarray(COUNT)), embeddings)


@pytest.mark.parametrize("name", VARIANTS)
def test_proposals(name: str) -> None:
    """Hidden states of positions 1..C-1, for a context that is longer than the window and a shorter one."""
    config = config_of(name)
    features, embeddings = inputs(config)
    hidden = run(config, features, embeddings)
    assert hidden.shape == (B, C - 1, config.hidden_size)
    for row, count in enumerate(COUNT):
        context = np.asarray(features, np.float64)[row, :count]
        expected = reference.draft(
            config, params_of(config), context, np.asarray(embeddings, np.float64)[row]
        )
        np.testing.assert_allclose(hidden[row], expected, atol=2e-4)


def test_a_window_that_covers_everything_is_full_attention() -> None:
    """And one that does not is not. Bidirectional: a causal one still hides the later rows."""
    wide = {"layer_types": BOTH, "sliding_window": int(COUNT.max()) + C}
    features, embeddings = inputs(config_of("full"))
    target = testing.target_config()
    full = run(config_of("full"), features, embeddings)
    same = run(testing.draft_config(target, **wide, causal=(False, False)), features, embeddings)
    np.testing.assert_array_equal(full, same)
    for name in ("sliding, bidirectional", "causal", "sliding"):
        assert np.abs(np.asarray(run(config_of(name), features, embeddings) - full)).max() > 0.1, name
    causal = run(testing.draft_config(target, **wide), features, embeddings)
    np.testing.assert_array_equal(causal, run(config_of("causal"), features, embeddings))


@pytest.mark.parametrize("name", ["full", "causal"])
def test_a_block_row_sees_later_rows_unless_causal(name: str) -> None:
    config = config_of(name)
    features, embeddings = inputs(config)
    moved = embeddings.at[:, -1].add(1.0)
    before, after = run(config, features, embeddings), run(config, features, moved)
    earlier = np.abs(np.asarray(before - after))[:, :-1].max()
    assert earlier == 0 if name == "causal" else earlier > 0.01
    assert np.abs(np.asarray(before - after))[:, -1].max() > 0.01


def test_features_from_the_anchor_on_are_never_seen() -> None:
    """Rows at and after `count` (the anchor's position) may be anything, also NaN; row count - 1 counts."""
    config = config_of("full")
    features, embeddings = inputs(config)
    before = run(config, features, embeddings)
    later = jnp.arange(ROWS)[None, :, None] >= jnp.asarray(COUNT)[:, None, None]
    for garbage in (7.0, jnp.nan):
        after = run(config, jnp.where(later, garbage, features), embeddings)
        np.testing.assert_array_equal(before, after)
    last = jnp.arange(ROWS)[None, :, None] == jnp.asarray(COUNT)[:, None, None] - 1
    moved = run(config, jnp.where(last, features + 1, features), embeddings)
    assert (np.abs(np.asarray(before - moved)).max(axis=(1, 2)) > 0.01).all()


def test_a_context_in_pieces_is_a_context_at_once() -> None:
    """Three extensions of any counts, with garbage behind each: keys are turned by absolute position."""
    config = config_of("full")
    params = params_of(config)
    features, embeddings = inputs(config)
    pieces = draft_cache(config, B, SLOTS, jnp.float32)
    for counts in ([4, 0], [1, 2], [6, 1]):
        at, count = np.asarray(pieces.length), np.array(counts, np.int32)
        rows = jnp.full(features.shape, jnp.nan)
        for row in range(B):
            taken = features[row, at[row] : at[row] + count[row]]
            rows = rows.at[row, : count[row]].set(taken)
        pieces = extend(config, params, pieces, rows, jnp.asarray(count))
    np.testing.assert_array_equal(pieces.length, COUNT)
    np.testing.assert_allclose(
        propose(config, params, pieces, embeddings), run(config, features, embeddings), atol=1e-5
    )


def test_proposing_reads_the_cache_and_does_not_write_it() -> None:
    config = config_of("full")
    features, embeddings = inputs(config)
    empty = draft_cache(config, B, SLOTS, jnp.float32)
    cache = extend(config, params_of(config), empty, features, jnp.asarray(COUNT))
    before = jax.tree.map(np.array, cache)
    one = propose(config, params_of(config), cache, embeddings)
    two = propose(config, params_of(config), cache, embeddings)
    np.testing.assert_array_equal(one, two)
    jax.tree.map(np.testing.assert_array_equal, before, cache)


@pytest.mark.parametrize(
    ("scale", "cap", "expected"),
    [
        (1.0, 0.0, lambda x: x),
        (0.25, 0.0, lambda x: x / 4),
        (1.0, 3.0, lambda x: 3 * np.tanh(x / 3)),
        (2.0, 5.0, lambda x: 5 * np.tanh(2 * x / 5)),
    ],
)
def test_the_targets_head_then_scale_then_softcap(scale: float, cap: float, expected: Any) -> None:
    config = testing.draft_config(testing.target_config(), logit_scale=scale, softcap=cap)
    hidden = jnp.asarray(np.linspace(-9, 9, B * 3 * 32).reshape(B, 3, 32), jnp.float32)
    logits = DFlash(config).logits(hidden, lambda x: 2 * x[..., : testing.VOCAB])
    np.testing.assert_allclose(logits, expected(2 * np.asarray(hidden)[..., : testing.VOCAB]), rtol=1e-5)


def test_a_draft_has_no_embedding_and_no_head() -> None:
    tree = drafts.abstract_params(config_of("three taps, two layers"))
    assert set(tree) == {"fc", "hidden_norm", "norm", "layers_0", "layers_1"}
    assert tree["fc"]["weight"].shape == (32, 3 * 32)
    assert set(tree["layers_0"]["self_attn"]) == {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}


def test_bfloat16_drafts_stay_bfloat16() -> None:
    config = config_of("full")
    features, embeddings = inputs(config)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(config))
    empty = draft_cache(config, B, SLOTS, jnp.bfloat16)
    cache = extend(config, params, empty, features.astype(jnp.bfloat16), jnp.asarray(COUNT))
    hidden = propose(config, params, cache, embeddings.astype(jnp.bfloat16))
    assert hidden.dtype == cache.layers[0].k.dtype == jnp.bfloat16
    exact = np.asarray(run(config, features, embeddings))
    assert np.abs(np.asarray(hidden, np.float32) - exact).mean() < 0.1 * exact.std()


# --- in the loop --------------------------------------------------------------------------------------


def test_rejected_rows_never_enter_the_context() -> None:
    """After rounds that rejected most candidates, both caches are those of a fresh prefill of the text."""
    state = decode.generate(pair(), decode.prefill(pair(), PROMPTS, BLOCKS, max_new_tokens=BUDGET), BLOCKS)
    generation = finish(state)
    assert 1 < generation.tau < 2
    texts = [[*p, *out][:-1] for p, out in zip(PROMPTS, generation.tokens, strict=True)]
    assert_caches_close(state, decode.prefill(pair(), texts, BLOCKS, max_new_tokens=1))


def test_the_loop_proposes_what_the_reference_proposes() -> None:
    """The whole path, taps to candidates, for one round: features of the target, mask embeddings, head."""
    models = pair()
    assert models.draft is not None
    target, draft = models.target.config, models.draft.config
    state = decode.prefill(models, PROMPTS, BLOCKS, max_new_tokens=BUDGET)
    _, trace = next(iter(stepwise.generate_stepwise(models, state, BLOCKS)))
    table = np.asarray(models.target_params["embed_tokens"]["weight"], np.float64)
    for row, prompt in enumerate(PROMPTS):
        _, after = reference.target(target, models.target_params, prompt)
        block = [int(state.anchor[row])] + [draft.mask_token_id] * (draft.block_size - 1)
        context = reference.features(after, draft.taps)
        hidden = reference.draft(draft, models.draft_params, context, table[block])
        logits = reference.head(target, models.target_params, hidden)
        assert np.asarray(trace.block.tokens)[row, 1:].tolist() == logits.argmax(-1).tolist()
