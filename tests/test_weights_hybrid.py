"""Qwen3.5 in Hugging Face folders: as a text model, and as the text part of a model with a vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import writers
from writers import assert_trees_equal, write_config

from dflash_jax import targets, testing
from dflash_jax.config import FULL, RECURRENT, ConfigError, RopeConfig
from dflash_jax.weights import hf
from dflash_jax.weights.tensors import flatten

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": testing.VOCAB,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "layer_types": [RECURRENT, FULL, RECURRENT, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    # of vision only; plain text positions are the same on all three axes
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0], "mrope_interleaved": True,
    },
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
WHOLE = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
CONFIG = testing.target_config("qwen3_5")
ABSTRACT = targets.abstract_params(CONFIG)
PARAMS = testing.random_params(ABSTRACT)
# What a checkpoint has beside its text model.
OTHERS = {
    "mtp.fc.weight": np.ones((32, 64), np.float32),
    "mtp.layers.0.self_attn.q_proj.weight": np.ones((128, 32), np.float32),
    "model.visual.patch_embed.proj.weight": np.ones((16, 3, 2, 4, 4), np.float32),
    "model.visual.blocks.0.norm1.bias": np.ones(16, np.float32),
}


def text(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (TEXT | changes).items() if value is not None}


def tensors(prefix: str = "model.") -> dict[str, np.ndarray]:
    """PARAMS by the names of a checkpoint whose text model has this prefix; the head is at the root."""
    names = ((path.replace("layers_", "layers."), value) for path, value in flatten(PARAMS).items())
    return {name if "lm_head" in name else prefix + name: np.asarray(value) for name, value in names}


def read(folder: Path) -> dict[str, Any]:
    return hf.load_target(folder, hf.target_config(folder), ABSTRACT, np.float32)


def test_a_text_model_is_read(tmp_path: Path) -> None:
    folder = writers.hf_folder(
        tmp_path / "t", {"architectures": ["Qwen3_5ForCausalLM"], **TEXT}, tensors() | {"mtp.a": np.ones(1)}
    )
    assert hf.target_config(folder) == CONFIG
    assert_trees_equal(read(folder), PARAMS)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_vision_model_is_read(tmp_path: Path, prefix: str) -> None:
    """Under either prefix, and in shards; nothing of the tower or of the extra heads is loaded."""
    config = {**WHOLE, "text_config": TEXT, "vision_config": {"hidden_size": 16}}
    folder = writers.hf_folder(tmp_path / "t", config, tensors(prefix) | OTHERS, shards=3)
    assert hf.target_config(folder) == CONFIG
    hf.check_target(folder, CONFIG, ABSTRACT)
    assert_trees_equal(read(folder), PARAMS)


def test_tying_is_said_at_the_root(tmp_path: Path) -> None:
    """transformers looks at the root's flag alone; a file that has only the text's means that."""
    for i, (root, own, tied) in enumerate(((True, False, True), (False, True, False), (None, True, True))):
        config = {**WHOLE, "text_config": text(tie_word_embeddings=own)}
        config |= {} if root is None else {"tie_word_embeddings": root}
        assert hf.target_config(write_config(tmp_path / str(i), config)).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": None}, (RECURRENT, RECURRENT, RECURRENT, FULL)),
        ({"layer_types": None, "full_attention_interval": 2}, (RECURRENT, FULL, RECURRENT, FULL)),
        ({"full_attention_interval": 4}, (RECURRENT, FULL, RECURRENT, FULL)),
    ],
)
def test_layers_are_named_or_counted(tmp_path: Path, changes: dict, expected: tuple[str, ...]) -> None:
    config = {"architectures": ["Qwen3_5ForCausalLM"], **text(**changes)}
    assert hf.target_config(write_config(tmp_path / "t", config)).layer_types == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_parameters": {"rope_theta": 1e4}}, 4),  # transformers' default of this family
        ({"rope_parameters": {"rope_theta": 1e4}, "partial_rotary_factor": 0.5}, 8),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}, "partial_rotary_factor": 0.5}, 16),
    ],
)  # fmt: skip
def test_the_rotating_part_is_found_where_transformers_finds_it(
    tmp_path: Path, changes: dict, expected: int
) -> None:
    config = hf.target_config(
        write_config(tmp_path / "t", {"architectures": ["Qwen3_5ForCausalLM"], **text(**changes)})
    )
    assert config.rotary_dim == expected and config.rope == RopeConfig(1e4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": None}, "text_config.linear_num_value_heads is missing"),
        ({"linear_num_value_heads": 3}, "3 value heads over 2 key heads: not a multiple"),
        ({"attn_output_gate": False}, "text_config.attn_output_gate is false"),
        ({"full_attention_interval": 0}, "text_config.full_attention_interval is 0"),
        ({"layer_types": [RECURRENT] * 4}, "no attention layer"),
        ({"layer_types": ["sliding_attention", FULL] * 2}, "text_config.layer_types has sliding layers"),
        ({"head_dim": None}, "text_config.head_dim is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.05}}, "rotates 0 of 16"),
        ({"quantization_config": {"bits": 4}}, "text_config.quantization_config marks quantised weights"),
    ],
)
def test_a_bad_config_is_one_clear_error(tmp_path: Path, changes: dict, message: str) -> None:
    folder = write_config(tmp_path / "t", {**WHOLE, "text_config": text(**changes)})
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        hf.target_config(folder)
    assert message in str(error.value)


def test_only_listed_tensors_are_ignored(tmp_path: Path) -> None:
    """A tensor of an unknown part is an error, as is one that two names claim."""
    config = {**WHOLE, "text_config": TEXT}
    more = {"model.audio.proj.weight": np.ones((2, 2), np.float32)}
    folder = writers.hf_folder(tmp_path / "a", config, tensors("model.language_model.") | more)
    with pytest.raises(ConfigError, match=r"unknown model\.audio\.proj\.weight"):
        read(folder)
    twice = tensors("model.language_model.") | {"model.norm.weight": np.ones(32, np.float32)}
    with pytest.raises(ConfigError, match=r"are both model\.norm\.weight"):
        read(writers.hf_folder(tmp_path / "b", config, twice))


def test_a_saved_target_reads_back_equal(tmp_path: Path) -> None:
    hf.save_target(tmp_path / "t", CONFIG, PARAMS, np.float32)
    assert hf.target_config(tmp_path / "t") == CONFIG
    assert_trees_equal(read(tmp_path / "t"), PARAMS)
