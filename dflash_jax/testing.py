"""Tiny models for tests and notebooks: every mechanism of a real pair, milliseconds a forward.

All sizes differ from each other, so that two axes that are mixed up do not fit by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax import drafts, targets
from dflash_jax.buckets import bucket
from dflash_jax.cache import DraftCache, KVCache, extend_context
from dflash_jax.config import (
    FULL,
    RECURRENT,
    DraftConfig,
    MoeConfig,
    RecurrentConfig,
    RopeConfig,
    TargetConfig,
)
from dflash_jax.drafts import DFlash
from dflash_jax.state import Models

VOCAB = 11  # small, so that a random draft is right now and then
BLOCK = 8


def target_config(family: str = "qwen3", **changes: Any) -> TargetConfig:
    """Two layers, 4 query heads over 2 key/value heads, head size 16 on a hidden size of 32. qwen3_5: four,
    of which every second has attention, the others 6 value heads over 2 key heads; a quarter of a head
    rotates. The MoE families: 2 of 5 experts a token, in qwen3_moe from the second layer on."""
    fields: dict[str, Any] = {
        "family": family,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "rope": RopeConfig(1e4),
        "tie_word_embeddings": family == "llama",
        "attention_bias": family == "qwen2",
    }
    if family in ("qwen3_5", "qwen3_5_moe"):
        layers = changes.get("num_layers", 4)
        fields |= {
            "num_layers": layers,
            "layer_types": tuple(FULL if i % 2 else RECURRENT for i in range(layers)),
            "rotary_dim": 4,
            "recurrent": RecurrentConfig(key_heads=2, value_heads=6, key_dim=8, value_dim=10),
        }
    layers = changes.get("num_layers", fields["num_layers"])
    if family == "qwen3_moe":
        fields["moe"] = MoeConfig(5, 2, 12, (False,) + (True,) * (layers - 1), normalise=False)
    if family == "qwen3_5_moe":
        fields |= {"moe": MoeConfig(5, 2, 12, (True,) * layers, 20), "intermediate_size": 12}
    return TargetConfig(**(fields | changes))


def draft_config(target: TargetConfig, **changes: Any) -> DraftConfig:
    """A draft for `target` that taps its first and its last layer. The mask token is id 0, a token
    that the target also emits."""
    fields: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 40,
        "vocab_size": target.vocab_size,
        "rope": RopeConfig(1e4),
        "block_size": BLOCK,
        "mask_token_id": 0,
        "taps": (0, target.num_layers - 1),
        "num_target_layers": target.num_layers,
    }
    return DraftConfig(**(fields | changes))


def random_params(abstract: dict, seed: int = 0, gain: float = 3.0) -> dict:
    """Random float32 values for `abstract_params(config)`.

    With the usual 0.02 a model repeats one token for ever. Unit embeddings and matrices of gain 3
    (of what keeps the variance) make the next token depend on all tokens before it: greedy outputs
    of the tiny targets have no period in 48 tokens. Norms are not 1 and biases not 0, so that
    leaving one out shows. Gated delta heads forget at rates from a few tokens to a few hundred.
    """
    rng = np.random.default_rng(seed)
    # hybrid targets multiply by 1 + w, except in the norm within a delta layer
    hybrid = any("linear_attn" in layer for layer in abstract.values())

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
        names = [entry.key for entry in path]
        values = rng.standard_normal(leaf.shape)
        if names[-1] == "bias":
            values = 0.3 * values
        elif names[-1] == "A_log":
            values = 1.5 * values - 3
        elif len(leaf.shape) == 1:
            values = (0 if hybrid and "linear_attn" not in names else 1) + 0.2 * values
        elif names[0] == "lm_head":
            values = 2 * values / np.sqrt(leaf.shape[-1])
        elif names[0] != "embed_tokens":
            values = gain * values / np.sqrt(leaf.shape[-1])
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract)


def make_models(target: TargetConfig, draft: DraftConfig | None = None, seed: int = 0) -> Models:
    """A random target and a random draft of these shapes (default: `draft_config(target)`)."""
    draft = draft or draft_config(target)
    return Models(
        target_params=random_params(targets.abstract_params(target), seed),
        draft_params=random_params(drafts.abstract_params(draft), seed + 1),
        target=targets.make_target(target),
        draft=DFlash(draft),
    )


class ScriptedDraft(DFlash):
    """A draft that recites: at position p of row b it proposes `params["script"][b, p]`.

    It has the methods and the cache of a draft and no layers. With the target's own output as the
    script it is always right, with anything else exactly as wrong as wanted; and since it looks its
    proposals up by its context's length, it is right only while positions are.
    """

    def setup(self) -> None:
        """No submodules: the script is the only parameter."""

    def extend(
        self, cache: DraftCache, features: Float[Array, "B T PD"], count: Int[Array, " B"]
    ) -> DraftCache:
        shape = (features.shape[0], self.config.num_kv_heads, features.shape[1], self.config.head_dim)
        rows = KVCache(jnp.zeros(shape, features.dtype), jnp.zeros(shape, features.dtype))
        return extend_context(cache, (rows,) * self.config.num_layers, count)

    def propose(self, cache: DraftCache, embeddings: Float[Array, "B C D"]) -> Float[Array, "B c D"]:
        """Token ids in place of hidden states; `logits` reads them."""
        script: Array = self.get_variable("params", "script")
        positions = cache.length[:, None] + jnp.arange(1, embeddings.shape[1])[None]
        tokens = jnp.take_along_axis(script, jnp.minimum(positions, script.shape[1] - 1), axis=1)
        return jnp.broadcast_to(tokens[..., None].astype(embeddings.dtype), embeddings[:, 1:].shape)

    def logits(self, hidden: Float[Array, "B c D"], head: Callable[[Array], Array]) -> Float[Array, "B c V"]:
        return 20.0 * jax.nn.one_hot(hidden[..., 0].astype(jnp.int32), self.config.vocab_size)


def scripted(models: Models, texts: Sequence[Sequence[int]], wrong: np.ndarray | bool = False) -> Models:
    """`models` with a draft that proposes the tokens of texts[b] (prompt and output) by position.

    wrong [B, positions], or one bool for all: where it proposes another token instead.
    """
    assert models.draft is not None
    script = np.zeros((len(texts), bucket(max(map(len, texts)))), np.int32)
    for row, text in zip(script, texts, strict=True):
        row[: len(text)] = text
    mistaken = np.zeros(script.shape, bool)
    if isinstance(wrong, np.ndarray):
        width = min(wrong.shape[1], script.shape[1])
        mistaken[:, :width] = wrong[:, :width]
    else:
        mistaken[:] = wrong
    script = np.where(mistaken, (script + 1) % models.target.config.vocab_size, script)
    params = {"script": jnp.asarray(script, jnp.int32)}
    draft = ScriptedDraft(models.draft.config)
    return Models(models.target_params, params, models.target, draft)
