"""GGUF targets: llama, qwen2 and qwen3, in any quantisation that gguf-py decodes.

Two things differ from Hugging Face. Kernels come as rows of quantised blocks. And llama.cpp rotates the
`llama` architecture in pairs (2i, 2i+1), so its converter interleaves the rows of q and k; here they are
put back, because all models here rotate halves (i, i + H/2).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dflash_jax.config import ConfigError, RopeConfig, TargetConfig
from dflash_jax.weights.fields import MAX_LAYERS, Fields, naming
from dflash_jax.weights.gguf_file import GGUFFile, read_file
from dflash_jax.weights.names import TARGET_GGUF
from dflash_jax.weights.tensors import Tensor, check, load, wanted

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Architectures of DFlash drafts and who writes them.
DRAFTS = {"dflash": "llama.cpp", "qwen35-dflash-draft": "Luce", "dflash-draft": "community converters"}

_ROPE_FREQS = "rope_freqs.weight"
# rope_freqs is read into the config; attn_rot_embd is a table that old converters stored.
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
_ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


def target_config(path: str | Path) -> TargetConfig:
    """Read the metadata of a GGUF target.

    Raises ConfigError for another architecture (a DFlash draft is named as such), for metadata that
    is missing or not supported, and for everything gguf_file.read_file refuses.
    """
    file = read_file(path)
    family = _architecture(file)
    fields = _section(file, family)
    if fields.integer("expert_count", 0):
        raise fields.error("expert_count", "marks a mixture of experts: not supported here")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ConfigError(f"{file.path}: has no tensor token_embd.weight [V, D]: not a complete model")
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = _head_dim(fields, hidden, heads)
    max_positions = fields.integer("context_length", 0)
    _refuse_window(fields, max_positions)
    with naming(file.path):
        return TargetConfig(
            family=family,
            hidden_size=hidden,
            num_layers=fields.integer("block_count", most=min(MAX_LAYERS, len(file.tensors))),
            num_heads=heads,
            num_kv_heads=fields.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=fields.integer("feed_forward_length"),
            vocab_size=table.shape[0],
            rope=_read_rope(fields, _divisors(file, head_dim), max_positions),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in file.tensors,
            # GGUF has no flags for biases: the tensors are there or not
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            attention_out_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            max_positions=max_positions,
        )


def is_draft(path: str | Path) -> bool:
    """Whether a GGUF file says that it is a DFlash draft, of any family of writers."""
    return read_file(path).metadata.get("general.architecture") in DRAFTS


def _section(file: GGUFFile, name: str) -> Fields:
    """The metadata whose keys begin with `name.`"""
    prefix = f"{name}."
    values = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    return Fields(file.path, values, name)


def _architecture(file: GGUFFile) -> str:
    fields = Fields(file.path, file.metadata)
    name = fields.text("general.architecture")
    if name in DRAFTS:
        raise ConfigError(
            f"{file.path}: this is a DFlash draft ('{name}', written by {DRAFTS[name]}), not a target: "
            "pass it as the draft"
        )
    if name not in ARCHITECTURES:
        raise fields.error(
            "general.architecture",
            f"is '{name}': targets can be {', '.join(ARCHITECTURES)}",
        )
    shards = fields.integer("split.count", 1)
    if shards > 1:
        raise fields.error("split.count", f"is {shards}: join the parts first (llama-gguf-split --merge)")
    return name


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    """An absent key_length means embedding_length / head_count, by the GGUF specification."""
    if heads == 0:
        raise fields.error("attention.head_count", "is 0: it must be positive")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    values = fields.integer("attention.value_length", head_dim)
    if values != head_dim:
        raise fields.error("attention.value_length", f"is {values}, keys have {head_dim}: not supported")
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise fields.error(
            "rope.dimension_count", f"is {rotated}, not all {head_dim} of a head: not supported"
        )
    return head_dim


def _refuse_window(fields: Fields, max_positions: int) -> None:
    window = fields.integer("attention.sliding_window", 0)
    if window and not 0 < max_positions <= window:
        raise fields.error("attention.sliding_window", f"is {window}: not supported in GGUF targets")


def _read_rope(fields: Fields, divisors: tuple[float, ...], max_positions: int) -> RopeConfig:
    theta = fields.number("rope.freq_base")
    kind = fields.text("rope.scaling.type", "none")
    factor = (
        fields.number("rope.scaling.factor", 1.0) if kind == "none" else fields.number("rope.scaling.factor")
    )
    if kind == "none" and "rope.scale_linear" in fields:  # as it was written before rope.scaling.type
        kind, factor = "linear", fields.number("rope.scale_linear")
    if kind == "none":
        return RopeConfig(theta, divisors=divisors)
    if divisors:
        raise fields.error(
            "rope.scaling.type", f"is '{kind}' beside {_ROPE_FREQS}: both at once is not supported"
        )
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind != "yarn":
        raise fields.error("rope.scaling.type", f"is '{kind}': none, linear or yarn is supported")
    if fields.number("rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
        raise fields.error("rope.scaling.yarn_log_multiplier", "other than 0 is not supported")
    if fields.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise fields.error("rope.scaling.yarn_ext_factor", "other than 1 is not supported")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_positions=fields.integer("rope.scaling.original_context_length", max_positions),
        attention_factor=_attention_factor(fields, factor),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _attention_factor(fields: Fields, factor: float) -> float | None:
    """yarn's scale of cos and sin. The converter writes Hugging Face's attention_factor, the whole scale,
    as `yarn_attn_factor`; `attn_factor` multiplies yarn's own scale instead (llama.cpp, llama-context)."""
    whole = fields.number("rope.scaling.yarn_attn_factor", None)
    multiplier = fields.number("rope.scaling.attn_factor", 1.0)
    if multiplier == 1.0:
        return whole
    own = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return multiplier * (own if whole is None else whole)


def _divisors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    """llama3 scaling, as one divisor for each frequency."""
    tensor = file.tensors.get(_ROPE_FREQS)
    if tensor is None:
        return ()
    if tensor.decode is None or tensor.shape != (head_dim // 2,):
        raise ConfigError(
            f"{file.path}: {_ROPE_FREQS} is {list(tensor.shape)}, expected [{head_dim // 2}] floats"
        )
    values = tensor.rows(0, len(tensor.raw)).ravel()
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ConfigError(f"{file.path}: {_ROPE_FREQS} must hold positive numbers")
    return tuple(float(value) for value in values)


def load_target(
    path: str | Path, config: TargetConfig, abstract: Mapping[str, Any], dtype: DTypeLike
) -> dict[str, Any]:
    """Parameters of a target, dequantised to numpy arrays in `dtype` and shaped as `abstract`
    (targets.abstract_params).

    Raises one ConfigError that lists all missing, unknown and misshapen tensors.
    """
    file = read_file(path)
    found = _target_tensors(file, config)
    return load(file.path, found, wanted(abstract, TARGET_GGUF.to_file), dtype)


def check_target(path: str | Path, config: TargetConfig, abstract: Mapping[str, Any]) -> None:
    """The errors of load_target, from the file's header alone."""
    file = read_file(path)
    check(file.path, _target_tensors(file, config), wanted(abstract, TARGET_GGUF.to_file))


def _target_tensors(file: GGUFFile, config: TargetConfig) -> dict[str, Tensor]:
    """The tensors of a model, q and k of `llama` with their rows put in half-split order."""
    family = _architecture(file)
    found = {name: tensor for name, tensor in file.tensors.items() if not _IGNORED.fullmatch(name)}
    if family == "llama":
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        for name, tensor in found.items():
            match = _ROTATED.fullmatch(name)
            # another number of rows is a wrong shape, which `load` reports with the others
            if match and len(tensor.raw) == heads[match[1]] * config.head_dim:
                order = _half_split_order(heads[match[1]], config.head_dim)
                found[name] = dataclasses.replace(tensor, order=order)
            elif match and tensor.kind != "F32" and match[2] == "bias":
                found[name] = dataclasses.replace(tensor, decode=None)  # rows lie inside a block
    return found


def _half_split_order(heads: int, head_dim: int) -> np.ndarray:
    """For each row in half-split order, the interleaved row that holds it: in a head, rows
    0, 1, 2, ... of the file are dimensions 0, H/2, 1, H/2 + 1, ..."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).ravel()
