"""GGUF files of qwen35, qwen35moe and qwen3moe for tests, written from a parameter tree by gguf-py with the
transforms that llama.cpp's converter applies. Nothing here is shared with the reader under test.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from writers import flatten

from dflash_jax.config import RECURRENT, RecurrentConfig, TargetConfig

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}


def name_of(path: str, hybrid: bool) -> str:
    if path in NAMES:
        return NAMES[path]
    layer, rest = path.removeprefix("layers_").split(".", 1)
    if rest == "post_attention_layernorm.weight":
        return f"blk.{layer}." + ("post_attention_norm.weight" if hybrid else "ffn_norm.weight")
    return f"blk.{layer}.{IN_LAYER[rest]}"


def tiled(value: np.ndarray, recurrent: RecurrentConfig, width: int, axis: int = 0) -> np.ndarray:
    """Value heads of `width` along `axis`: from k0 k0 k1 k1 (by the key head that each reads) to k0 k1 k0 k1."""
    each = recurrent.value_heads // recurrent.key_heads
    heads = np.split(value, recurrent.value_heads, axis=axis)
    assert heads[0].shape[axis] == width
    order = [key * each + turn for turn in range(each) for key in range(recurrent.key_heads)]
    return np.concatenate([heads[head] for head in order], axis=axis)


def converted(path: str, value: np.ndarray, config: TargetConfig) -> np.ndarray:
    """What the converter stores for a parameter."""
    leaf = path.split(".", 1)[-1] if path.startswith("layers_") else path
    r = config.recurrent
    if leaf == "mlp.shared_expert_gate.weight":
        return value.reshape(-1)
    if r is None:
        return value
    keys, width = 2 * r.key_heads * r.key_dim, r.value_dim
    match leaf:
        case "linear_attn.in_proj_qkv.weight" | "linear_attn.conv1d.weight":
            flat = value.reshape(r.channels, -1)
            return np.concatenate([flat[:keys], tiled(flat[keys:], r, width)])
        case "linear_attn.in_proj_z.weight":
            return tiled(value, r, width)
        case "linear_attn.in_proj_a.weight" | "linear_attn.in_proj_b.weight" | "linear_attn.dt_bias":
            return tiled(value, r, 1)
        case "linear_attn.A_log":
            return -np.exp(tiled(value, r, 1))
        case "linear_attn.out_proj.weight":
            return tiled(value, r, width, axis=1)
        case "linear_attn.norm.weight":
            return value
        case _ if leaf.endswith("norm.weight"):
            return value + np.float32(1)
        case _:
            return value


def metadata_of(config: TargetConfig, further: int, flags: bool) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": config.num_layers + further,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.rotary_dim,
    }
    if config.family != "qwen3_5_moe":
        keys["feed_forward_length"] = config.intermediate_size
    if config.moe is not None:
        keys["expert_count"] = config.moe.experts
        keys["expert_used_count"] = config.moe.per_token
        keys["expert_feed_forward_length"] = config.moe.intermediate_size
        if config.moe.shared_intermediate_size:
            keys["expert_shared_feed_forward_length"] = config.moe.shared_intermediate_size
    if (r := config.recurrent) is not None:
        keys["ssm.conv_kernel"] = r.conv_width
        keys["ssm.inner_size"] = r.value_heads * r.value_dim
        keys["ssm.state_size"] = r.key_dim
        keys["ssm.time_step_rank"] = r.value_heads
        keys["ssm.group_count"] = r.key_heads
        recurrent = [kind == RECURRENT for kind in config.layer_types]
        if flags:
            keys["attention.recurrent_layers"] = recurrent + [False] * further
        else:
            keys["full_attention_interval"] = recurrent.index(False) + 1
    if further:
        keys["nextn_predict_layers"] = further
    return keys


def write(
    path: Path,
    config: TargetConfig,
    params: Mapping[str, Any],
    *,
    kind: str = "F32",
    fused: bool = False,
    flags: bool = False,
    further: int = 0,
    metadata: dict[str, Any] | None = None,
    changes: dict[str, np.ndarray | None] | None = None,
) -> Path:
    """kind quantises matrices. fused: experts' gate and up in one tensor. flags: layer types as a flag each,
    not as an interval. further: blocks that predict further tokens. metadata: further keys without the
    architecture's prefix; changes: tensors by their GGUF name; None removes one.
    """
    architecture, hybrid = ARCHITECTURES[config.family], config.recurrent is not None
    writer = gguf.GGUFWriter(path, architecture)
    adds = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    for key, value in (metadata_of(config, further, flags) | (metadata or {})).items():
        if value is not None:
            adds[type(value)](f"{architecture}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(config.vocab_size)])

    tensors: dict[str, np.ndarray | None] = {}
    for ours, leaf in flatten(dict(params)).items():
        name, value = name_of(ours, hybrid), converted(ours, np.asarray(leaf, np.float32), config)
        if "gate_up" in name and not fused:
            half = value.shape[1] // 2
            tensors[name.replace("gate_up", "gate")] = value[:, :half]
            tensors[name.replace("gate_up", "up")] = value[:, half:]
        else:
            tensors[name] = value
    for block in range(config.num_layers, config.num_layers + further):
        tensors[f"blk.{block}.nextn.eh_proj.weight"] = np.ones((config.hidden_size, 2 * config.hidden_size))
        tensors[f"blk.{block}.attn_norm.weight"] = np.ones(config.hidden_size)
    for name, value in (tensors | (changes or {})).items():
        if value is None:
            continue
        value = np.ascontiguousarray(value, np.float32)
        matrix = value.ndim > 1 and "conv1d" not in name
        quantisation = gguf.GGMLQuantizationType[kind if matrix else "F32"]
        raw = gguf.quants.quantize(value, quantisation)
        writer.add_tensor(name, raw, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
