"""Writing a GGUF file, tensor by tensor, by gguf-py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from dflash_jax.config import ConfigError
from dflash_jax.weights.atomic import replacing_name

# Kinds of matrices that are written: llama.cpp's number for a file that is mostly so, and the largest
# magnitude that the kind holds.
KINDS: dict[str, tuple[gguf.LlamaFileType, float]] = {
    "F32": (gguf.LlamaFileType.ALL_F32, np.inf),
    "F16": (gguf.LlamaFileType.MOSTLY_F16, 65504.0),
    "BF16": (gguf.LlamaFileType.MOSTLY_BF16, np.inf),
    # a block's scale is a float16
    "Q8_0": (gguf.LlamaFileType.MOSTLY_Q8_0, 65504.0 * 127),
    "Q4_0": (gguf.LlamaFileType.MOSTLY_Q4_0, 65504.0 * 8),
}
_ARRAYS = {
    "bool": GGUFValueType.BOOL, "int8": GGUFValueType.INT8, "uint8": GGUFValueType.UINT8,
    "int16": GGUFValueType.INT16, "uint16": GGUFValueType.UINT16, "int32": GGUFValueType.INT32,
    "uint32": GGUFValueType.UINT32, "int64": GGUFValueType.INT64, "uint64": GGUFValueType.UINT64,
    "float32": GGUFValueType.FLOAT32, "float64": GGUFValueType.FLOAT64,
}  # fmt: skip


def write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: str,
) -> int:
    """Write a file under a temporary name, then rename it; returns its bytes.

    metadata: bools, integers (u32), floats (f32), strings, lists of strings, numpy arrays (by their dtype).
    tensors: row-major, in this order; matrices become `kind`, vectors float32. One tensor at a time is
    converted. ConfigError where a matrix does not fit the kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"{path}: type '{kind}' is not written: one of {', '.join(KINDS)} is")
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    writer.add_file_type(KINDS[kind][0])
    if GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] > 1:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, value in tensors.items():
        _announce(path, writer, name, value, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_name(path) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, value in tensors.items():
                writer.write_tensor_data(_encoded(path, name, value, kind))
        finally:
            writer.close()
    return path.stat().st_size


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case np.ndarray():
            if len(value):
                kind = _ARRAYS[value.dtype.name]
                writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, sub_type=kind)
        case list():
            writer.add_array(key, value)
        case _:
            raise AssertionError(f"{key}: {type(value)}")


def _kind_of(value: np.ndarray, kind: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[kind if value.ndim > 1 else "F32"]


def _announce(path: Path, writer: gguf.GGUFWriter, name: str, value: np.ndarray, kind: str) -> None:
    """The tensor's entry in the table, before anything is converted."""
    quantisation = _kind_of(value, kind)
    block, block_bytes = GGML_QUANT_SIZES[quantisation]
    if value.shape[-1] % block:
        raise ConfigError(
            f"{path}: {name} has rows of {value.shape[-1]} values, {kind} needs a multiple of {block}: write "
            "F16 or BF16"
        )
    row_bytes = value.shape[-1] // block * block_bytes
    shape = (*value.shape[:-1], row_bytes)
    writer.add_tensor_info(name, shape, np.dtype(np.uint8), value.size // block * block_bytes, quantisation)


def _encoded(path: Path, name: str, value: np.ndarray, kind: str) -> np.ndarray:
    values = np.ascontiguousarray(value, np.float32)
    largest = np.abs(values).max(initial=0.0)
    if not np.isfinite(largest):
        raise ConfigError(
            f"{path}: {name} holds NaN or infinity: these weights are damaged, nothing is written"
        )
    if largest > KINDS[kind][1]:
        raise ConfigError(f"{path}: {name} holds {largest}, which {kind} cannot: write F32 or BF16")
    with np.errstate(all="ignore"):  # gguf-py divides by the scale of blocks of zeros
        return gguf.quants.quantize(values, _kind_of(value, kind))
