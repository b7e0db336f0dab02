"""GGUF targets written by gguf-py, damaged files of both kinds, and the real SmolLM2."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_py
import numpy as np
import pytest
import writers
from damage import assert_only_config_errors
from writers import BFLOAT16, assert_trees_equal

from dflash_jax import targets
from dflash_jax.config import ConfigError, RopeConfig
from dflash_jax.weights import gguf, gguf_file, hf
from dflash_jax.weights.tensors import flatten

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_reads_like_its_hugging_face_form(tmp_path: Path, family: str, tied: bool) -> None:
    tensors = writers.target_tensors(family, tied)
    path = tmp_path / "t.gguf"
    writers.gguf_target(path, family, tensors)
    config = gguf.target_config(path)
    folder = writers.hf_folder(tmp_path / "t", writers.target_json(family, tie_word_embeddings=tied), tensors)
    assert config == hf.target_config(folder)
    assert config.hash() == hf.target_config(folder).hash()
    loaded = gguf.load_target(path, config, targets.abstract_params(config), np.float32)
    assert_trees_equal(loaded, writers.expected_tree(tensors))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
def test_quantised_types(tmp_path: Path, kind: str, dtype: np.dtype) -> None:
    stored = writers.gguf_target(tmp_path / "t.gguf", "llama", writers.target_tensors("llama"), kind)
    config = gguf.target_config(tmp_path / "t.gguf")
    expected = writers.expected_tree(stored)
    assert_trees_equal(gguf.load_target(tmp_path / "t.gguf", config, expected, dtype), expected, dtype)


def test_biases_are_where_the_tensors_are(tmp_path: Path) -> None:
    tensors = writers.target_tensors("llama", bias=True)
    writers.gguf_target(tmp_path / "t.gguf", "llama", tensors)
    config = gguf.target_config(tmp_path / "t.gguf")
    assert (config.attention_bias, config.attention_out_bias, config.mlp_bias) == (True, True, False)
    expected = writers.expected_tree(tensors)
    # q and k biases are interleaved like their rows
    assert_trees_equal(gguf.load_target(tmp_path / "t.gguf", config, expected, np.float32), expected)


def test_rope_freqs_become_divisors(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, writers.HEAD_DIM // 2, dtype=np.float32)
    tensors = writers.target_tensors("llama")
    writers.gguf_target(tmp_path / "t.gguf", "llama", tensors, extra={"rope_freqs.weight": divisors})
    config = gguf.target_config(tmp_path / "t.gguf")
    assert config.rope == RopeConfig(10000.0, divisors=tuple(divisors.tolist()))
    expected = writers.expected_tree(tensors)
    assert_trees_equal(gguf.load_target(tmp_path / "t.gguf", config, expected, np.float32), expected)


YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "none"}, RopeConfig(1e4)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, RopeConfig(1e4, "linear", 2.0)),
        ({"rope.scale_linear": 2.0}, RopeConfig(1e4, "linear", 2.0)),
        (YARN, RopeConfig(1e4, "yarn", 4.0, 64)),
        (YARN | {"rope.scaling.original_context_length": None}, RopeConfig(1e4, "yarn", 4.0, 256)),
        (
            YARN | {"rope.scaling.yarn_attn_factor": 1.5},
            RopeConfig(1e4, "yarn", 4.0, 64, attention_factor=1.5),
        ),
        (
            YARN | {"rope.scaling.attn_factor": 2.0},
            RopeConfig(1e4, "yarn", 4.0, 64, attention_factor=2 * (0.1 * np.log(4.0) + 1)),
        ),
        (YARN | {"rope.scaling.yarn_beta_fast": 16.0}, RopeConfig(1e4, "yarn", 4.0, 64, beta_fast=16.0)),
    ],
)
def test_rope_scaling(tmp_path: Path, metadata: dict, expected: RopeConfig) -> None:
    table = {"model.embed_tokens.weight": np.ones((writers.VOCAB, writers.HIDDEN), np.float32)}
    writers.gguf_target(tmp_path / "t.gguf", "qwen3", table, metadata=metadata | {"block_count": 1})
    assert gguf.target_config(tmp_path / "t.gguf").rope == expected


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("gemma3", {}, "general.architecture is 'gemma3': targets can be llama, qwen2, qwen3"),
        ("dflash", {}, r"a DFlash draft \('dflash', written by llama\.cpp\), not a target"),
        ("qwen35-dflash-draft", {}, "a DFlash draft .* written by Luce"),
        ("dflash-draft", {}, "a DFlash draft .* community"),
        ("llama", {"expert_count": 8}, r"llama\.expert_count marks a mixture of experts"),
        ("llama", {"rope.freq_base": None}, r"llama\.rope\.freq_base is missing"),
        ("llama", {"rope.dimension_count": 16}, "not all 32 of a head"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "none, linear or yarn"),
        ("llama", {"rope.scaling.type": "yarn"}, r"rope\.scaling\.factor is missing"),
        ("llama", {"attention.value_length": 16}, r"attention\.value_length is 16"),
        ("llama", {"attention.sliding_window": 64}, r"attention\.sliding_window is 64"),
        ("llama", {"attention.head_count": 0}, r"attention\.head_count is 0"),
        ("llama", {"attention.head_count": "four"}, "must be an integer"),
        ("llama", {"attention.head_count_kv": 3}, "not a multiple"),
        ("llama", {"block_count": 2**31}, "must be between 0 and"),
        ("llama", {"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    ],
)
def test_metadata_that_does_not_fit_is_one_clear_error(
    tmp_path: Path, family: str, metadata: dict, message: str
) -> None:
    path = tmp_path / "t.gguf"
    writers.gguf_target(path, family, writers.target_tensors("llama"), metadata=metadata)
    with pytest.raises(ConfigError, match=message) as error:
        gguf.target_config(path)
    assert str(error.value).startswith(str(path))


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    tensors = writers.target_tensors("qwen3")
    expected = writers.expected_tree(tensors)
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    tensors["model.norm.weight"] = np.ones(65, np.float32)
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    writers.gguf_target(tmp_path / "t.gguf", "qwen3", tensors, extra=extra)
    with pytest.raises(ConfigError) as error:
        gguf.load_target(tmp_path / "t.gguf", gguf.target_config(tmp_path / "t.gguf"), expected, np.float32)
    for part in (
        "missing blk.1.attn_q_norm.weight [32]",
        "unknown blk.0.attn_sinks.weight [4]",
        "output_norm.weight is [65], expected [64]",
    ):
        assert part in str(error.value)


def test_metadata_values_are_plain(tmp_path: Path) -> None:
    writers.gguf_target(
        tmp_path / "t.gguf", "qwen2", writers.target_tensors("qwen2"), metadata={"flag": True}
    )
    metadata = gguf_file.read_file(tmp_path / "t.gguf").metadata
    assert metadata["qwen2.attention.layer_norm_rms_epsilon"] == 1e-5  # not the float32's long decimal
    assert metadata["qwen2.flag"] is True
    assert metadata["tokenizer.ggml.tokens"][:2] == ["token 0", "token 1"]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [1] * writers.VOCAB


# --- damaged files (case 32) --------------------------------------------------------------------------


def header(*parts: Any, tensors: int = 0, values: int = 0, version: int = 3) -> bytes:
    """A GGUF header; parts: bytes, str (length and text), or (struct code, number)."""
    data = b"GGUF" + struct.pack("<IQQ", version, tensors, values)
    for part in parts:
        if isinstance(part, str):
            data += struct.pack("<Q", len(part)) + part.encode()
        else:
            data += part if isinstance(part, bytes) else struct.pack(f"<{part[0]}", part[1])
    return data


def tensor(name: str = "t", sizes: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> list[Any]:
    return [name, ("I", len(sizes)), *(("Q", size) for size in sizes), ("I", kind), ("Q", offset)]


U32, F32, STRING, ARRAY = ("I", 4), ("I", 6), ("I", 8), ("I", 9)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (header()[:6], "the version needs 4 bytes"),
        (header(version=1), "version 1 is not supported"),
        (header(version=3 << 24), "big-endian"),
        (header()[:20], "the number of metadata values needs 8 bytes"),
        (header(tensors=2**63), "the number of tensors is 9223372036854775808, more than"),
        (header(values=2**40), "the number of metadata values is 1099511627776"),
        (header(("Q", 2**62), bytes(50), values=1), "a metadata key needs 4611686018427387904 bytes"),
        (header("key", STRING, ("Q", 2**50), values=1), "metadata 'key' needs"),
        (header("key", STRING, ("Q", 1), b"\xff", values=1), "not UTF-8"),
        (header("key", ("I", 99), bytes(50), values=1), "unknown type 99"),
        (header("key", ARRAY, U32, ("Q", 2**60), values=1), "metadata array 'key' is 1152921504606846976"),
        (header("key", ARRAY, STRING, ("Q", 2**60), values=1), "metadata array 'key' is"),
        (header("key", ARRAY, ARRAY, ("Q", 1), bytes(50), values=1), "holds arrays"),
        (header("key", U32, ("I", 1), "key", U32, ("I", 1), values=2), "'key' appears twice"),
        (header("general.alignment", U32, ("I", 12), values=1), "power of two"),
        (header(*tensor(sizes=(1,) * 5), tensors=1), "has 5 axes"),
        (header(*tensor(kind=200), bytes(100), tensors=1), "has type 200"),
        (header(*tensor(kind=2), bytes(100), tensors=1), "not a multiple of Q4_0's block of 32"),
        (header(*tensor(offset=32), bytes(100), tensors=1), "is at offset 32, expected 0"),
        (header(*tensor(sizes=(2**40, 2**40)), bytes(100), tensors=1), "it is truncated"),
        (header(*tensor(), *tensor(offset=32), bytes(100), tensors=2), "'t' appears twice"),
    ],
)
def test_a_bad_gguf_file_is_one_clear_error(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as error:
        gguf.target_config(path)
    assert str(error.value).startswith(str(path))


def test_absent_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        gguf.target_config(tmp_path / "absent.gguf")
    with pytest.raises(ConfigError, match="is a folder"):
        gguf.target_config(tmp_path)


def test_every_truncation_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    writers.gguf_target(tmp_path / "t.gguf", "llama", writers.target_tensors("llama"))
    data = (tmp_path / "t.gguf").read_bytes()
    for size in range(0, len(data), len(data) // 100):
        path = tmp_path / f"{size}.gguf"
        path.write_bytes(data[:size])
        with pytest.raises(ConfigError):
            gguf.target_config(path)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_random_damage_to_a_gguf_file_gives_a_config_error_or_a_load(tmp_path: Path, kind: str) -> None:
    tensors = writers.target_tensors("llama", bias=True)
    expected = writers.expected_tree(tensors)
    writers.gguf_target(tmp_path / "t.gguf", "llama", tensors, kind)
    data = (tmp_path / "t.gguf").read_bytes()

    def load(changed: bytes, i: int) -> None:
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(changed)
        loaded = gguf.load_target(path, gguf.target_config(path), expected, np.float32)
        assert {k: v.shape for k, v in flatten(loaded).items()} == {
            k: v.shape for k, v in flatten(expected).items()
        }
        path.unlink()

    assert_only_config_errors(load, data, data.index(b"output_norm.weight") + 60, seed=1)


def test_random_damage_to_a_draft_folder_gives_a_config_error_or_a_load(tmp_path: Path) -> None:
    tensors = writers.draft_tensors()
    expected = writers.expected_tree(tensors)
    good = writers.hf_folder(tmp_path / "good", writers.draft_json(), tensors)
    files = {name: (good / name).read_bytes() for name in ("model.safetensors", "config.json")}

    def load_with(name: str) -> Callable[[bytes, int], None]:
        def load(changed: bytes, i: int) -> None:
            folder = tmp_path / f"{name}-{i}"
            folder.mkdir()
            for other, content in (files | {name: changed}).items():
                (folder / other).write_bytes(content)
            hf.load_draft(folder, hf.draft_config(folder), expected, BFLOAT16)

        return load

    weights = files["model.safetensors"]
    (length,) = struct.unpack("<Q", weights[:8])
    assert_only_config_errors(load_with("model.safetensors"), weights, 8 + length, seed=2)
    config = files["config.json"]
    assert_only_config_errors(load_with("config.json"), config, len(config), seed=3)


# --- the real model -----------------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_loads_as_gguf_py_reads_it(smollm2_gguf: Path) -> None:
    config = gguf.target_config(smollm2_gguf)
    assert (config.family, config.num_layers, config.hidden_size, config.vocab_size) == (
        "llama",
        30,
        576,
        49152,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings and config.rope == RopeConfig(1e5) and config.rms_norm_eps == 1e-5
    params = gguf.load_target(smollm2_gguf, config, targets.abstract_params(config), np.float32)
    flat = flatten(params)
    assert sum(value.size for value in flat.values()) == 134_515_008

    stored = {tensor.name: tensor for tensor in gguf_py.GGUFReader(smollm2_gguf).tensors}

    def raw(name: str) -> np.ndarray:
        return gguf_py.quants.dequantize(stored[name].data, stored[name].tensor_type)

    np.testing.assert_array_equal(flat["embed_tokens.weight"], raw("token_embd.weight"))
    np.testing.assert_array_equal(flat["layers_29.mlp.down_proj.weight"], raw("blk.29.ffn_down.weight"))
    for ours, theirs, heads in (("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)):
        weight = flat[f"layers_7.self_attn.{ours}.weight"]
        np.testing.assert_array_equal(writers.interleave(weight, heads), raw(f"blk.7.{theirs}.weight"))
