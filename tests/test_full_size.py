"""Real hybrid and routed models by their published configs: parameters, caches and trails, nothing allocated."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import writers

from dflash_jax import targets
from dflash_jax.cache import cache_bytes, trail_bytes
from dflash_jax.config import FULL, TargetConfig
from dflash_jax.weights import hf
from dflash_jax.weights.tensors import flatten
from infer.published import SHAPES

QWEN35 = {
    "vocab_size": 248320, "head_dim": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "attn_output_gate": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
}  # fmt: skip


def dense(hidden: int, layers: int, inner: int, heads: int, kv: int, value_heads: int) -> dict[str, Any]:
    return QWEN35 | {
        "model_type": "qwen3_5_text", "hidden_size": hidden, "num_hidden_layers": layers,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv,
        "linear_num_value_heads": value_heads,
    }  # fmt: skip


def with_eyes(architecture: str, text: dict[str, Any], tied: bool = False) -> dict[str, Any]:
    return {
        "architectures": [architecture], "text_config": text, "vision_config": {"depth": 27},
        "tie_word_embeddings": tied,
    }  # fmt: skip


MODELS = {
    "Qwen3.5-4B": with_eyes("Qwen3_5ForConditionalGeneration", dense(2560, 32, 9216, 16, 4, 32), tied=True),
    "Qwen3.5-9B": with_eyes("Qwen3_5ForConditionalGeneration", dense(4096, 32, 12288, 16, 4, 32)),
    "Qwen3.5-27B": with_eyes("Qwen3_5ForConditionalGeneration", dense(5120, 64, 17408, 24, 4, 48)),
    "Qwen3.5-35B-A3B": with_eyes(
        "Qwen3_5MoeForConditionalGeneration",
        QWEN35 | {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
            "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
            "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "hidden_act": "silu",
        "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
}  # fmt: skip
MIB = 2**20


@functools.cache
def config_of(name: str) -> TargetConfig:
    with tempfile.TemporaryDirectory() as folder:
        return hf.target_config(writers.write_config(Path(folder) / "model", MODELS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_the_shapes_that_speed_is_measured_of(name: str) -> None:
    assert SHAPES[name.lower()] == config_of(name)


def counted(c: TargetConfig) -> int:
    """Parameters from the sizes alone, matrix by matrix."""
    gated = c.family != "qwen3_moe"  # queries come with a gate
    attention = c.hidden_size * c.head_dim * ((2 + gated) * c.num_heads + 2 * c.num_kv_heads) + 2 * c.head_dim
    recurrent, mlp = 0, 3 * c.hidden_size * c.intermediate_size
    if (r := c.recurrent) is not None:
        keys, values = r.key_heads * r.key_dim, r.value_heads * r.value_dim
        projections = c.hidden_size * (2 * keys + values + values + 2 * r.value_heads + values)
        recurrent = projections + r.conv_width * (2 * keys + values) + 2 * r.value_heads + r.value_dim
    if (m := c.moe) is not None:
        shared = m.shared_intermediate_size
        mlp = c.hidden_size * (3 * (m.experts * m.intermediate_size + shared) + m.experts + (shared > 0))
    layers = sum(
        2 * c.hidden_size + mlp + (attention if kind == FULL else recurrent) for kind in c.layer_types
    )
    return layers + c.hidden_size * (1 + c.vocab_size * (1 if c.tie_word_embeddings else 2))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen3.5-4B", 4_205_751_296),
        ("Qwen3.5-9B", 8_953_803_264),
        ("Qwen3.5-27B", 26_895_998_464),
        ("Qwen3.5-35B-A3B", 34_660_610_688),
        ("Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_parameters(name: str, parameters: int) -> None:
    abstract = targets.abstract_params(config_of(name))
    assert sum(math.prod(leaf.shape) for leaf in flatten(abstract).values()) == parameters
    assert counted(config_of(name)) == parameters


@pytest.mark.parametrize(
    ("name", "attention", "per_token", "state"),
    [
        # bfloat16: 2 (k, v) * kv heads * head size * 2 bytes in each attention layer; states are float32:
        # value heads * 128 * 128 * 4 bytes and 3 inputs of the convolution in each recurrent one
        ("Qwen3.5-4B", 8, 8 * 4096, 24 * (2 * MIB + 3 * 8192 * 2)),
        ("Qwen3.5-9B", 8, 8 * 4096, 24 * (2 * MIB + 3 * 8192 * 2)),
        ("Qwen3.5-27B", 16, 16 * 4096, 48 * (3 * MIB + 3 * 10240 * 2)),
        ("Qwen3.5-35B-A3B", 10, 10 * 2048, 30 * (2 * MIB + 3 * 8192 * 2)),
        ("Qwen3-30B-A3B", 48, 48 * 2048, 0),
    ],
)
def test_caches(name: str, attention: int, per_token: int, state: int) -> None:
    config = config_of(name)
    assert config.layer_types.count(FULL) == attention
    assert cache_bytes(config, 1, 0, 2) == state
    assert cache_bytes(config, 1, 1000, 2) == state + 1000 * per_token


@pytest.mark.parametrize(
    ("name", "tape", "states"),
    [
        # a verify of 16 nodes in bfloat16, in MiB. 27B: 1 for the keys and values of 16 layers, and in each
        # of 48 recurrent layers 16 tapes of 16 keys and 48 deltas of 128 and 48 decays, or 16 states of 3 MiB,
        # beside 16 inputs of 10240 channels
        ("Qwen3.5-4B", 15.55, 774.5),
        ("Qwen3.5-9B", 15.55, 774.5),
        ("Qwen3.5-27B", 40.14, 2320.0),
        ("Qwen3.5-35B-A3B", 19.12, 967.8),
        ("Qwen3-30B-A3B", 1.5, 1.5),
    ],
)
def test_trails(name: str, tape: float, states: float) -> None:
    config = config_of(name)
    assert trail_bytes(config, 1, 16, 2, "tape") / MIB == pytest.approx(tape, abs=0.02)
    assert trail_bytes(config, 1, 16, 2, "states") / MIB == pytest.approx(states, abs=0.02)
