"""How the tensors of a GGUF target lie, and how they become those of a Hugging Face checkpoint.

Kernels come as rows of quantised blocks, so reordering rows is free and reordering columns waits until they
are decoded. llama.cpp's converter changes these, and here they are put back:

    llama     rotation in pairs (2i, 2i+1): rows of q and k interleaved; all models here rotate halves
    qwen35    norms stored as 1 + w (not that of gated delta layers); A_log as -exp(A_log); value heads
              tiled (head h reads key head h % Hk) where Hugging Face has them grouped (h // (Hv / Hk)):
              in the rows of qkv, z, alpha, beta, in the convolution's channels, in A_log and dt_bias, and
              in the columns of the output projection
    experts   gate and up in two tensors, where the parameter is one

Sources: llama.cpp `conversion/qwen.py`, `src/models/qwen35.cpp`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dflash_jax.config import RecurrentConfig, TargetConfig
from dflash_jax.weights.gguf_file import GGUFFile
from dflash_jax.weights.names import TARGET_GGUF, TARGET_GGUF_HYBRID
from dflash_jax.weights.tensors import Tensor, Wanted, wanted

# rope_freqs is read into the config; attn_rot_embd is a table that old converters stored.
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
_ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
# Norms of hybrids that are stored as 1 + w.
_PLUS_ONE = ("attn_norm.weight", "post_attention_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight")
# Vectors and filters that Hugging Face stores with one more axis, of length 1.
_SQUEEZED = ("ssm_conv1d.weight", "ffn_gate_inp_shexp.weight")

Decode = Callable[[np.ndarray], np.ndarray]


def restored(file: GGUFFile, config: TargetConfig) -> dict[str, Tensor]:
    """The tensors of the model proper, each as the checkpoint has it. Shapes are not judged here: what does
    not fit is left as it is, for the comparison of all shapes at once."""
    found = _without_further(file.tensors, config.num_layers)
    found = {name: tensor for name, tensor in found.items() if not _IGNORED.fullmatch(name)}
    if config.family == "llama":
        return {name: _half_split(name, tensor, config) for name, tensor in found.items()}
    if config.recurrent is not None:
        heads = _Heads(config.recurrent)
        return {name: _hybrid(name, tensor, heads) for name, tensor in found.items()}
    return found


def expected(
    found: Mapping[str, Tensor], config: TargetConfig, abstract: Mapping[str, Any]
) -> dict[str, Wanted]:
    """What the file must hold: {name: parameter}."""
    table = TARGET_GGUF if config.recurrent is None else TARGET_GGUF_HYBRID
    wants: dict[str, Wanted] = {}
    for name, want in wanted(abstract, table.to_file).items():
        if name.endswith("ffn_gate_up_exps.weight") and name not in found:
            wants |= _split_experts(name, want)
        elif name.endswith(_SQUEEZED):
            wants[name] = dataclasses.replace(want, **_squeezed(want, found.get(name)))
        else:
            wants[name] = want
    return wants


def problems(found: Mapping[str, Tensor]) -> list[str]:
    """Values that no converter writes."""
    decays = {name: tensor for name, tensor in found.items() if name.endswith(".ssm_a") and len(tensor.raw)}
    with np.errstate(all="ignore"):
        return [
            f"{name} must be negative: it is -exp(A_log)"
            for name, tensor in decays.items()
            if tensor.decode is not None and np.isnan(tensor.rows(0, len(tensor.raw))).any()
        ]


def _split_experts(name: str, want: Wanted) -> dict[str, Wanted]:
    """The parameter [E, 2I, D] from two tensors [E, I, D], gate first."""
    experts, both, hidden = want.shape
    half = both // 2
    rows = {"gate": slice(0, half), "up": slice(half, both)}
    return {
        name.replace("gate_up", kind): Wanted(
            want.path, (experts, half, hidden), whole=want.shape, part=(slice(None), part)
        )
        for kind, part in rows.items()
    }


def _squeezed(want: Wanted, tensor: Tensor | None) -> dict[str, Any]:
    """The shape in the file, with the axis of length 1 or without it."""
    bare = tuple(size for size in want.shape if size != 1)
    if tensor is not None and tuple(size for size in tensor.shape if size != 1) == bare:
        bare = tensor.shape
    return {"shape": bare, "whole": want.shape}


def _without_further(found: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Without the blocks after the model's own that predict further tokens: those with `nextn` tensors."""
    blocks = {name: match for name in found if (match := _IN_BLOCK.fullmatch(name))}
    further = {match[1] for match in blocks.values() if match[2].startswith("nextn.")}
    further = {block for block in further if int(block) >= layers}
    return {
        name: tensor for name, tensor in found.items() if name not in blocks or blocks[name][1] not in further
    }


# --- orders -------------------------------------------------------------------------------------------


def _reordered(tensor: Tensor, order: np.ndarray) -> Tensor:
    """Row i of the result is row order[i]."""
    if len(tensor.raw) == len(order):
        return dataclasses.replace(tensor, order=order)
    if tensor.shape[0] == len(order):
        return dataclasses.replace(tensor, decode=None)  # the rows of a vector lie inside a block
    return tensor


def _decoded(tensor: Tensor, change: Decode) -> Tensor:
    """The tensor with `change` after its own decoding, [rows, columns] each."""
    decode = tensor.decode
    if decode is None:
        return tensor
    return dataclasses.replace(tensor, decode=lambda raw: change(decode(raw).reshape(len(raw), -1)))


def _half_split(name: str, tensor: Tensor, config: TargetConfig) -> Tensor:
    """q and k of `llama`: in a head, rows 0, 1, 2, ... of the file are dimensions 0, H/2, 1, H/2 + 1, ..."""
    match = _ROTATED.fullmatch(name)
    if match is None:
        return tensor
    heads = config.num_heads if match[1] == "q" else config.num_kv_heads
    rows = np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2)
    return _reordered(tensor, rows.swapaxes(1, 2).ravel())


class _Heads:
    """Where the rows of each grouped value head lie in the file."""

    def __init__(self, config: RecurrentConfig) -> None:
        tiled = np.arange(config.value_heads).reshape(-1, config.key_heads)
        self.heads = tiled.T.ravel()
        width = np.arange(config.value_dim)
        self.values = (self.heads[:, None] * config.value_dim + width).ravel()
        self.keys = 2 * config.key_heads * config.key_dim
        self.channels = np.concatenate([np.arange(self.keys), self.keys + self.values])

    def restore(self, name: str, tensor: Tensor) -> Tensor:
        """`name`: within its block."""
        match name:
            case "attn_qkv.weight" | "ssm_conv1d.weight":
                return _reordered(tensor, self.channels)
            case "attn_gate.weight":
                return _reordered(tensor, self.values)
            case "ssm_alpha.weight" | "ssm_beta.weight" | "ssm_dt.bias":
                return _reordered(tensor, self.heads)
            case "ssm_a":
                return _decoded(_reordered(tensor, self.heads), lambda a: np.log(-a))
            case "ssm_out.weight" if tensor.shape[-1] == len(self.values):
                return _decoded(tensor, lambda kernel: kernel[:, self.values])
            case _:
                return tensor


def _hybrid(name: str, tensor: Tensor, heads: _Heads) -> Tensor:
    match = _IN_BLOCK.fullmatch(name)
    if name == "output_norm.weight" or (match is not None and match[2] in _PLUS_ONE):
        return _decoded(tensor, _minus_one)
    return tensor if match is None else heads.restore(match[2], tensor)


def _minus_one(values: np.ndarray) -> np.ndarray:
    return values - values.dtype.type(1)
