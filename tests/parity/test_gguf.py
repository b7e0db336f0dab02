"""From transformers through a GGUF file with every transform of the converter, back to the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hybrid_gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity.twins import FLOAT32, VOCAB, difference, empty_cache, forward, target_twin, torch_states

from dflash_jax import targets
from dflash_jax.block import chain_block
from dflash_jax.config import FULL, RECURRENT
from dflash_jax.weights import gguf, hf

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {},
    "qwen3_5, attention first": {"layer_types": [FULL, RECURRENT, RECURRENT, FULL]},
    "qwen3_5_moe": {"layer_types": [RECURRENT, FULL] * 2},
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_in_gguf_gives_its_logits(tmp_path: Path, kind: str) -> None:
    family = kind.partition(",")[0]
    twin = target_twin(tmp_path / "hf", family, **KINDS[kind])
    config = twin.module.config
    path = hybrid_gguf.write(
        tmp_path / "t.gguf", config, jax.tree.map(np.asarray, twin.params), flags="first" in kind
    )
    read = gguf.target_config(path)
    assert read == config
    assert read.hash() == hf.target_config(twin.folder).hash()
    params = gguf.load_target(path, read, targets.abstract_params(read), FLOAT32)
    text = np.random.default_rng(0).integers(0, VOCAB, 21).tolist()
    block = chain_block(jnp.asarray([text], jnp.int32))
    module = targets.make_target(read)
    out = forward(module, jax.tree.map(jnp.asarray, params), block, empty_cache(read, 1, 24))
    theirs = torch_states(twin.torch, text)[1]
    assert difference(out.logits[0], theirs) <= 1e-4
    # what the order of heads is about: with one key head, or one value head for each, there is one order
    if (r := config.recurrent) is not None:
        assert r.value_heads > r.key_heads > 1
