"""Targets written as GGUF: what the reader reads back, byte for byte what gguf-py writes with llama.cpp's
layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf as gguf_py
import numpy as np
import pytest
import writers
from writers import assert_trees_equal

from dflash_jax import layers, targets, testing
from dflash_jax.config import FULL, SLIDING, ConfigError, RopeConfig
from dflash_jax.weights import gguf, gguf_export, gguf_rope, hf

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_there_and_back(tmp_path: Path, family: str, kind: str) -> None:
    tied = family == "llama"
    tensors = writers.target_tensors(family, tied)
    json = writers.target_json(family, tie_word_embeddings=tied)
    config = hf.target_config(writers.hf_folder(tmp_path / "hf", json, tensors))
    path = tmp_path / "ours.gguf"
    size = gguf_export.save_target(path, config, writers.expected_tree(tensors), kind)
    assert size == path.stat().st_size

    stored = writers.gguf_target(tmp_path / "theirs.gguf", family, tensors, kind)
    found = gguf.target_config(path)
    assert found == config and found.hash() == config.hash()
    loaded = gguf.load_target(path, found, targets.abstract_params(found), np.float32)
    assert_trees_equal(loaded, writers.expected_tree(stored))

    ours, theirs = (gguf_py.GGUFReader(p) for p in (path, tmp_path / "theirs.gguf"))
    assert {t.name for t in ours.tensors} == {t.name for t in theirs.tensors}
    expected = {tensor.name: tensor for tensor in theirs.tensors}
    for tensor in ours.tensors:
        assert tensor.tensor_type == expected[tensor.name].tensor_type
        np.testing.assert_array_equal(tensor.data, expected[tensor.name].data)
    for key, field in theirs.fields.items():
        if key.startswith(f"{family}."):
            assert ours.fields[key].contents() == field.contents(), key


def test_llama3_scaling_becomes_divisors(tmp_path: Path) -> None:
    """Our own frequencies, and those of the divided ones, in float32."""
    rope = RopeConfig(5e5, "llama3", 8.0, 8192)
    config = testing.target_config("llama", head_dim=64, rope=rope)
    params = testing.random_params(targets.abstract_params(config))
    path = tmp_path / "t.gguf"
    gguf_export.save_target(path, config, params, "F32")
    found = gguf.target_config(path)
    assert found.rope.type == "default" and len(found.rope.divisors) == 32
    ours, theirs = (layers.rope_frequencies(r, 64)[0] for r in (rope, found.rope))
    np.testing.assert_allclose(theirs, ours, rtol=1e-5)
    # and once more from the divisors
    gguf_export.save_target(tmp_path / "again.gguf", found, params, "F32")
    assert gguf.target_config(tmp_path / "again.gguf").rope == found.rope
    assert gguf_rope.divisors(RopeConfig(1e4), 64) is None


def test_the_vocabulary_is_copied_as_it_is(tmp_path: Path) -> None:
    tensors = writers.target_tensors("qwen3")
    writers.gguf_target(tmp_path / "a.gguf", "qwen3", tensors, metadata={"x": 1})
    config, words = gguf.target_config(tmp_path / "a.gguf"), gguf_export.vocabulary(tmp_path / "a.gguf")
    assert set(words) == {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"}
    gguf_export.save_target(tmp_path / "b.gguf", config, writers.expected_tree(tensors), "F16", words)
    before, after = (gguf_py.GGUFReader(tmp_path / name).fields for name in ("a.gguf", "b.gguf"))
    for key in words:
        assert after[key].contents() == before[key].contents() and after[key].types == before[key].types


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3_moe", {}), ("qwen3_5", {}), ("qwen3", {"layer_types": (SLIDING, FULL), "sliding_window": 8})],
)
def test_other_targets_are_not_written(tmp_path: Path, family: str, changes: dict) -> None:
    config = dataclasses.replace(testing.target_config(family), **changes)
    with pytest.raises(ConfigError, match="are written as GGUF, with full attention in all layers: this is"):
        gguf_export.save_target(tmp_path / "t.gguf", config, {}, "F32")
