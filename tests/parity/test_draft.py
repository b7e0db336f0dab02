"""The draft against the PyPI package dflash: hidden states and logits, round after round."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from dflash.model import _crop_to, _make_cache
from parity.twins import DEPTH, HIDDEN, VOCAB, Twin, difference, draft_twin

from dflash_jax.cache import DraftCache, draft_cache
from dflash_jax.config import DraftConfig

SLIDING = ["sliding_attention"] * 2
MIXED = ["full_attention", "sliding_attention"]
WINDOW = {"use_sliding_window": True, "sliding_window": 5}  # shorter than the block and than its context

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "full-causal": {"is_causal": True},
    "sliding": {"layer_types": SLIDING, **WINDOW},
    "sliding-both-ways": {"layer_types": SLIDING, "is_causal": False, **WINDOW},
    "sliding-wide": {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 64},
    "mixed": {"layer_types": MIXED, **WINDOW},
    "mixed-both-ways": {"layer_types": MIXED, "is_causal": False, **WINDOW},
    "window-off": {"layer_types": MIXED, "sliding_window": 5},
    "one-tap": {"taps": [DEPTH - 1]},
    "many-taps": {"taps": range(DEPTH), "attention_bias": True, "num_key_value_heads": 1},
    "scaled": {
        "own": {"input_embedding_scale": 5.5, "output_multiplier": 0.3, "final_logit_softcapping": 0.8}
    },
    "scaled-top-level": {"input_embedding_scale": 0.4, "final_logit_softcapping": 2.0},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}
# Positions that each of two rows commits before each block. The first piece is the prompt's.
PIECES = [(13, 4), (1, 2), (6, 1), (3, 6)]
WIDEST, SLOTS = 13, 48
BLOCK = 6
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=KINDS)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param != "window-off":
        return draft_twin(folder, BLOCK, **KINDS[request.param])
    with pytest.warns(UserWarning, match="use_sliding_window"):
        return draft_twin(folder, BLOCK, **KINDS[request.param])


@partial(jax.jit, static_argnames="module")
def step(
    module: Any, params: Any, cache: DraftCache, features: Any, count: Any, embeddings: Any, head: Any
) -> tuple[DraftCache, Any, Any]:
    """Extend the context, then propose: the draft's part of a round."""
    cache = module.apply({"params": params}, cache, features, count, method="extend")
    hidden = module.apply({"params": params}, cache, embeddings, method="propose")
    return cache, hidden, module.logits(hidden, lambda x: jnp.einsum("btd,vd->btv", x, head))


class Reference:
    """One sequence of the reference, with its own cache, driven as its `dflash_generate` does."""

    def __init__(self, model: Any) -> None:
        self.model, self.length = model, 0
        # transformers has no cache for sliding layers without a window; theirs then see everything.
        windowless = model.config.sliding_window is None
        self.cache = transformers.DynamicCache() if windowless else _make_cache(model.config)

    @torch.inference_mode()
    def step(self, features: np.ndarray, embeddings: np.ndarray, head: np.ndarray) -> tuple[Any, Any]:
        """(hidden states, logits) of a block after `features` more positions."""
        positions = torch.arange(self.length, self.length + len(features) + len(embeddings))[None]
        scale = self.model.config.dflash_config.get(
            "input_embedding_scale", getattr(self.model.config, "input_embedding_scale", 1.0)
        )
        hidden = self.model(
            target_hidden=torch.from_numpy(features)[None],
            noise_embedding=torch.from_numpy(embeddings)[None] * scale,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.length += len(features)
        _crop_to(self.cache, self.length)
        hidden = hidden[:, 1:]
        logits = self.model.compute_logits(hidden, lambda x: x @ torch.from_numpy(head).T)
        return hidden[0].numpy(), logits[0].numpy()


@pytest.mark.parametrize("size", [BLOCK, 3])
def test_rounds_equal_the_reference(twin: Twin, size: int) -> None:
    """Rows of unequal context, each compared with its own run of the reference; blocks of the trained
    size and smaller."""
    config: DraftConfig = twin.module.config
    rng = np.random.default_rng(0)
    head = rng.standard_normal((VOCAB, HIDDEN), np.float32)
    references = [Reference(twin.torch) for _ in PIECES[0]]
    cache = draft_cache(config, len(references), SLOTS, np.float32)
    for counts in PIECES:
        # Rows beyond a row's count are features of rejected candidates: noise that must not matter.
        features = rng.standard_normal((len(counts), WIDEST, len(config.taps) * HIDDEN), np.float32)
        embeddings = rng.standard_normal((len(counts), size, HIDDEN), np.float32)
        cache, hidden, logits = step(
            twin.module, twin.params, cache, features, np.array(counts, np.int32), embeddings, head
        )
        for b, (reference, count) in enumerate(zip(references, counts, strict=True)):
            theirs = reference.step(features[b, :count], embeddings[b], head)
            assert hidden[b].shape == theirs[0].shape == (size - 1, HIDDEN)
            gaps = difference(hidden[b], theirs[0]), difference(logits[b], theirs[1])
            assert max(gaps) <= TOLERANCE, (
                f"row {b}: hidden differs by {gaps[0]:.2e}, logits by {gaps[1]:.2e}"
            )
    assert cache.length.tolist() == [reference.length for reference in references]


def test_kinds_are_what_they_say(twin: Twin, request: pytest.FixtureRequest) -> None:
    """The config that was read has the feature that the kind is here for: else the rest tests less."""
    config, name = twin.module.config, request.node.callspec.params["twin"]
    both_ways = "both-ways" in name
    assert config.layer_types == tuple(KINDS[name].get("layer_types", ["full_attention"] * 2))
    if "layer_types" in KINDS[name] and name != "window-off":
        assert config.sliding_window == (64 if "wide" in name else 5)
        assert config.causal == tuple(t.startswith("sliding") and not both_ways for t in config.layer_types)
    else:
        assert config.sliding_window is None
    assert (config.causal == (True, True)) == (name in ("full-causal", "sliding", "sliding-wide"))
    assert len(config.taps) != config.num_layers
    assert (config.embedding_scale != 1.0) == name.startswith("scaled") == (config.softcap > 0)


def test_softcap_bends(tmp_path: Path) -> None:
    """The cap of the kind "scaled" is low enough to act on logits of the size that the test uses."""
    twin = draft_twin(tmp_path, BLOCK, **KINDS["scaled"])
    raw = jnp.full((1, 1, VOCAB), 6.0)
    assert difference(twin.module.logits(raw, lambda x: x), raw * 0.3) > 0.5
