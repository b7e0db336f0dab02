"""Hugging Face targets, and files that are not what they should be: one clear error each."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import writers
from writers import BFLOAT16, assert_trees_equal, write_config

from dflash_jax import targets
from dflash_jax.config import FULL, SLIDING, ConfigError, RopeConfig, TargetConfig
from dflash_jax.weights import hf, names
from dflash_jax.weights.atomic import check_writable, replacing
from dflash_jax.weights.tensors import flatten

FAMILIES = ("llama", "qwen2", "qwen3")


def target_config(tmp_path: Path, family: str, **changes: Any) -> TargetConfig:
    return hf.target_config(write_config(tmp_path / "target", writers.target_json(family, **changes)))


# --- targets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_folder_loads(tmp_path: Path, family: str, shards: int) -> None:
    tensors = writers.target_tensors(family)
    folder = writers.hf_folder(tmp_path / "t", writers.target_json(family), tensors, shards)
    config = hf.target_config(folder)
    assert (config.family, config.head_dim, config.rms_norm_eps) == (family, 32, 1e-5)
    assert config.attention_bias == (family == "qwen2")
    loaded = hf.load_target(folder, config, targets.abstract_params(config), np.float32)
    assert_trees_equal(loaded, writers.expected_tree(tensors))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_biases_are_where_the_config_says(tmp_path: Path, family: str) -> None:
    tensors = writers.target_tensors(family, bias=True)
    folder = writers.hf_folder(tmp_path / "t", writers.target_json(family, attention_bias=True), tensors)
    config = hf.target_config(folder)
    assert config.attention_bias and config.attention_out_bias
    loaded = hf.load_target(folder, config, targets.abstract_params(config), np.float32)
    assert_trees_equal(loaded, writers.expected_tree(tensors))


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("wanted", [np.dtype(np.float32), BFLOAT16])
def test_stored_types_convert(tmp_path: Path, stored: Any, wanted: np.dtype) -> None:
    tensors = {
        name: value.astype(stored) for name, value in writers.target_tensors("llama", tied=True).items()
    }
    folder = writers.hf_folder(
        tmp_path / "t", writers.target_json("llama", tie_word_embeddings=True), tensors
    )
    expected = writers.expected_tree(tensors)
    loaded = hf.load_target(folder, hf.target_config(folder), expected, wanted)
    assert_trees_equal(loaded, expected, wanted)


def test_the_official_library_writes_what_we_read(tmp_path: Path) -> None:
    tensors = writers.target_tensors("qwen3")
    folder = write_config(tmp_path / "t", writers.target_json("qwen3"))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "np"})
    expected = writers.expected_tree(tensors)
    assert_trees_equal(hf.load_target(folder, hf.target_config(folder), expected, np.float32), expected)


def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path: Path) -> None:
    tensors = writers.target_tensors("llama", tied=True)
    expected = writers.expected_tree(tensors)
    config = writers.target_json("llama", tie_word_embeddings=True)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    same = writers.hf_folder(
        tmp_path / "same", config, tensors | buffer | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    )
    assert_trees_equal(hf.load_target(same, hf.target_config(same), expected, np.float32), expected)
    other = writers.hf_folder(tmp_path / "other", config, writers.target_tensors("llama"))
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        hf.load_target(other, hf.target_config(other), expected, np.float32)


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    tensors = writers.target_tensors("qwen3")
    expected = writers.expected_tree(tensors)
    del tensors["model.layers.1.self_attn.q_norm.weight"], tensors["lm_head.weight"]
    tensors["model.norm.weight"] = np.ones(65, np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((96, 64), np.int32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((96, 64), np.float32)
    folder = writers.hf_folder(tmp_path / "t", writers.target_json("qwen3"), tensors)
    with pytest.raises(ConfigError) as error:
        hf.load_target(folder, hf.target_config(folder), expected, np.float32)
    for part in (
        "missing model.layers.1.self_attn.q_norm.weight [32]",
        "missing lm_head.weight [80, 64]",
        "unknown model.layers.2.mlp.up_proj.weight [96, 64]",
        "model.norm.weight is [65], expected [64]",
        "model.layers.0.mlp.up_proj.weight has type I32",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_sliding_layers_of_targets_follow_the_flag(tmp_path: Path, family: str) -> None:
    on = {"use_sliding_window": True, "sliding_window": 8}
    config = target_config(tmp_path, family, **on, max_window_layers=1)
    assert (config.layer_types, config.sliding_window) == ((FULL, SLIDING), 8)
    config = target_config(tmp_path, family, **on, layer_types=[SLIDING, FULL])
    assert (config.layer_types, config.sliding_window) == ((SLIDING, FULL), 8)
    config = target_config(tmp_path, family, sliding_window=8, max_window_layers=1)
    assert (config.layer_types, config.sliding_window) == ((FULL, FULL), None)
    with pytest.warns(UserWarning, match="use_sliding_window"):
        config = target_config(tmp_path, family, sliding_window=8, layer_types=[SLIDING, FULL])
    assert (config.layer_types, config.sliding_window) == ((FULL, FULL), None)


def test_llama_defaults_are_those_of_its_definition(tmp_path: Path) -> None:
    config = target_config(
        tmp_path, "llama", head_dim=None, num_key_value_heads=None, rope_parameters=None, rope_theta=1e4
    )
    assert (config.head_dim, config.num_kv_heads, config.tie_word_embeddings) == (16, 4, False)
    assert config.rope == RopeConfig(1e4)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM: not supported as a target"),
        ("llama", {"architectures": ["DFlashDraftModel"]}, "this is a DFlash draft, not a target"),
        ("llama", {"rope_parameters": None}, "rope_theta is missing"),
        ("llama", {"layer_types": [SLIDING, FULL]}, "sliding layers"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ("qwen3", {"head_dim": None}, "head_dim is missing"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_window is missing"),
        ("qwen2", {"num_attention_heads": 0}, "num_heads is 0"),
    ],
)
def test_a_bad_target_config_is_one_clear_error(
    tmp_path: Path, family: str, changes: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        target_config(tmp_path, family, **changes)


# --- files that are not what they should be (case 32) -------------------------------------------------


def test_folders_without_a_model_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        hf.target_config(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        hf.draft_config(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a file"):
        hf.target_config(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[]", "not an object"),
        (b"\xff", "not valid JSON"),
        (b"[" * 10**5, "JSON"),
    ],
)
def test_a_bad_config_file_is_one_clear_error(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        hf.target_config(tmp_path)


def entry(**changes: Any) -> dict[str, Any]:
    return {"norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]} | changes}


NORM = {"norm.weight": np.ones(64, np.float32)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\x10\0\0", "too few"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "is a git-lfs pointer"),
        (struct.pack("<Q", 2**63) + b"{}", "the header claims 9223372036854775808 bytes"),
        (struct.pack("<Q", 3) + b"{}", "the header claims 3 bytes"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
        (struct.pack("<Q", 2) + b"{,", "not valid JSON"),
        (b"GGUF" + bytes(100), "header"),
        (writers.safetensors_bytes(NORM)[:-1], "it is truncated"),
        (writers.safetensors_bytes(NORM) + b"x", "1 bytes follow the last tensor"),
        (writers.safetensors_bytes(NORM, **entry(dtype="F31")), "'F31'"),
        (writers.safetensors_bytes(NORM, **entry(shape=[65])), "takes 260"),
        (writers.safetensors_bytes(NORM, **entry(shape=[-64])), "no tensor of a model"),
        (writers.safetensors_bytes(NORM, **entry(shape=[2**70, 0])), "takes 0"),
        (writers.safetensors_bytes(NORM, **entry(shape="64")), "must be a list"),
        (writers.safetensors_bytes(NORM, **entry(data_offsets=[256, 0])), r"must be \[begin, end\]"),
        (writers.safetensors_bytes(NORM, **entry(data_offsets=[0, 2**63])), "it is truncated"),
        (writers.safetensors_bytes(NORM, **{"norm.weight": 3}), "not an object"),
        (writers.safetensors_bytes(NORM, copy=entry()["norm.weight"]), "overlap"),
    ],
)
def test_a_bad_safetensors_file_is_one_clear_error(tmp_path: Path, data: bytes, message: str) -> None:
    write_config(tmp_path, writers.draft_json())
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=message) as error:
        hf.load_draft(tmp_path, hf.draft_config(tmp_path), {}, np.float32)
    assert "model.safetensors" in str(error.value)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    write_config(tmp_path, writers.draft_json())
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ConfigError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        hf.load_draft(tmp_path, hf.draft_config(tmp_path), {}, np.float32)


def test_shards_must_agree_with_their_index(tmp_path: Path) -> None:
    tensors = writers.target_tensors("llama")
    expected = writers.expected_tree(tensors)
    folder = writers.hf_folder(tmp_path / "t", writers.target_json("llama"), tensors, shards=2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    second = "model-00002-of-00002.safetensors"

    def load_with(**weight_map: Any) -> None:
        index.write_text(json.dumps({"weight_map": good["weight_map"] | weight_map}))
        hf.load_target(folder, hf.target_config(folder), expected, np.float32)

    load_with()
    with pytest.raises(ConfigError, match=r"files that are not there: absent\.safetensors"):
        load_with(extra="absent.safetensors")
    for outside in ("../t/" + second, "/" + second, "config.json", 3):
        with pytest.raises(ConfigError, match="must be a safetensors file of this folder"):
            load_with(extra=outside)
    with pytest.raises(ConfigError, match=f"'extra' is not in {second}"):
        load_with(extra=second)
    with pytest.raises(ConfigError, match="weight_map is missing"):
        index.write_text("{}")
        hf.load_target(folder, hf.target_config(folder), expected, np.float32)


# --- names --------------------------------------------------------------------------------------------


def path_of(name: str) -> str:
    (path,) = flatten(writers.expected_tree({name: np.ones((1, 1), np.float32)}))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_names_go_both_ways(family: str) -> None:
    tensors = writers.target_tensors(family, bias=True)
    paths = [path_of(name) for name in tensors]
    assert [names.TARGET_HF.to_file(path) for path in paths] == list(tensors)
    assert [names.TARGET_GGUF.to_file(path) for path in paths] == [
        writers.gguf_name(name) for name in tensors
    ]
    for table in (names.TARGET_HF, names.TARGET_GGUF):
        assert [table.from_file(table.to_file(path)) for path in paths] == paths


def test_draft_names_go_both_ways() -> None:
    tensors = writers.draft_tensors()
    paths = [path_of(name) for name in tensors]
    assert [names.DRAFT_HF.to_file(path) for path in paths] == list(tensors)
    assert [names.DRAFT_HF.from_file(name) for name in tensors] == paths
    assert names.DRAFT_HF.from_file("layers.01.mlp.up_proj.weight") is None
    assert names.DRAFT_HF.from_file("lm_head.weight") is None


# --- writing ------------------------------------------------------------------------------------------


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    """A pipe or a device (/dev/null, as root) would be gone, and a file in its place."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"old")
    for name, says in (("pipe", "no regular file"), ("file/below", "create it first"), (".", "is a folder")):
        with pytest.raises(ConfigError, match=says):
            check_writable(tmp_path / name)
        with pytest.raises(ConfigError, match=says), replacing(tmp_path / name) as file:
            file.write(b"new")
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 2
    with replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
