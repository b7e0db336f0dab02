"""Model files for tests, written without the code under test: safetensors by hand, GGUF by gguf-py.

Tensors are dicts {Hugging Face name: float32 array [out, in]}, as checkpoints have them.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTER, VOCAB = 64, 2, 4, 2, 32, 96, 80
BLOCK, TAPS, DEPTH = 4, (0, 2, 5), 7

KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int32": "I32"}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


# --- contents -----------------------------------------------------------------------------------------


def layer_tensors(rng: np.random.Generator, prefix: str, norms: bool, bias: bool, out_bias: bool) -> dict:
    """One decoder layer; norms: of heads (qwen3 and drafts)."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (queries, HIDDEN),
        "self_attn.k_proj.weight": (keys, HIDDEN),
        "self_attn.v_proj.weight": (keys, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, queries),
        "mlp.gate_proj.weight": (INTER, HIDDEN),
        "mlp.up_proj.weight": (INTER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTER),
    }
    if norms:
        shapes |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
    if bias:
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", queries), ("k", keys), ("v", keys))}
    if out_bias:
        shapes |= {"self_attn.o_proj.bias": (HIDDEN,)}
    return {prefix + name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def target_tensors(
    family: str, tied: bool = False, bias: bool = False, seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors = {"model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN), np.float32)}
    for i in range(LAYERS):
        biased = bias or family == "qwen2"
        tensors |= layer_tensors(
            rng, f"model.layers.{i}.", family == "qwen3", biased, bias and family != "qwen2"
        )
    tensors["model.norm.weight"] = rng.standard_normal(HIDDEN, np.float32)
    if not tied:
        tensors["lm_head.weight"] = rng.standard_normal((VOCAB, HIDDEN), np.float32)
    return tensors


def draft_tensors(taps: int = len(TAPS), seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors = {
        "fc.weight": rng.standard_normal((HIDDEN, taps * HIDDEN), np.float32),
        "hidden_norm.weight": rng.standard_normal(HIDDEN, np.float32),
        "norm.weight": rng.standard_normal(HIDDEN, np.float32),
    }
    for i in range(LAYERS):
        tensors |= layer_tensors(rng, f"layers.{i}.", norms=True, bias=False, out_bias=False)
    return tensors


def expected_tree(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The nested parameters that a reader must return: weights as the file has them, [out, in]."""
    tree: dict[str, Any] = {}
    for name, value in tensors.items():
        path = name.removeprefix("model.").replace("layers.", "layers_").split(".")
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree


def target_json(family: str, **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTER,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    return changed(config, changes)


def draft_json(schema: str = "nested", **changes: Any) -> dict[str, Any]:
    """A config in one of the three schemas in the wild. A change to None removes the key."""
    own = {"mask_token_id": 3, "target_layer_ids": list(TAPS)}
    rope = {"rope_theta": 1e6, "rope_scaling": None}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTER,
        "vocab_size": VOCAB,
        "num_target_layers": DEPTH,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    if schema == "legacy":
        config |= rope | {"block_size": BLOCK, "dflash_config": own}
    elif schema == "nested":
        config |= {
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "dflash_config": own | {"block_size": BLOCK},
        }
    else:
        config |= rope | own | {"block_size": BLOCK}
    return changed(config, changes)


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes merge into nested objects; None removes."""
    merged = dict(config)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = changed(merged[key], value)
        elif value is None:
            merged.pop(key, None)
        else:
            merged[key] = value
    return merged


# --- Hugging Face folders -----------------------------------------------------------------------------


def safetensors_bytes(tensors: dict[str, np.ndarray], **header: Any) -> bytes:
    """header: entries that replace or add to those of the tensors."""
    entries: dict[str, Any] = {}
    data = b""
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        entries[name] = {
            "dtype": KINDS[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(entries | header).encode()
    return struct.pack("<Q", len(text)) + text + data


def hf_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return folder
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        (folder / shard).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def assert_trees_equal(found: dict, expected: dict, dtype: Any = np.float32) -> None:
    """Equal to the last bit after rounding to dtype."""
    found, expected = flatten(found), flatten(expected)
    assert set(found) == set(expected)
    for path, value in expected.items():
        assert found[path].dtype == dtype, path
        np.testing.assert_array_equal(found[path], value.astype(dtype), err_msg=path)


# --- GGUF ---------------------------------------------------------------------------------------------

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, leaf = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[module]}.{leaf}"
    return f"{GGUF_NAMES[module]}.{leaf}"


def interleave(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter puts them for the `llama` architecture."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def gguf_target(
    path: Path,
    family: str,
    tensors: dict[str, np.ndarray],
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write a target; returns the tensors with the values that the quantised file holds.

    kind quantises matrices; norms and biases are F32, as converters do. metadata: further keys without
    the architecture's prefix; None removes one. extra: tensors by their GGUF name, in F32.
    """
    writer = gguf.GGUFWriter(path, family)
    keys: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HEAD_DIM,
    }
    for key, value in (keys | (metadata or {})).items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
        }
        if value is not None:
            add[type(value)](f"{family}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(VOCAB)])
    writer.add_array("tokenizer.ggml.token_type", [1] * VOCAB)
    stored = {}
    for name, value in tensors.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        laid = interleave(value, heads) if family == "llama" and heads else value
        quantisation = gguf.GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        raw = gguf.quants.quantize(laid, quantisation)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=quantisation)
        # rows are quantised one by one, so their order does not change their values
        exact = gguf.quants.quantize(value, quantisation)
        stored[name] = gguf.quants.dequantize(exact, quantisation).reshape(value.shape)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
