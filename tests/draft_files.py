"""GGUF drafts of every family, written and parsed byte by byte: nothing here is shared with the code under
test, nor with gguf-py.

Tensors are dicts {Hugging Face name: float32 array [out, in]}, as in writers.py, whose sizes these have.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import writers

FAMILIES = ("upstream", "pre-merge", "luce", "community")
ARCHITECTURE = {
    "upstream": "dflash",
    "pre-merge": "dflash",
    "luce": "qwen35-dflash-draft",
    "community": "dflash-draft",
}
# What the families call fc, the context norm and the norm before the MLP.
_OWN_NAMES = {
    "upstream": ("fc", "enc.output_norm", "ffn_norm"),
    "pre-merge": ("fc", "hidden_norm", "ffn_norm"),
    "luce": ("dflash.fc", "dflash.hidden_norm", "ffn_norm"),
    "community": ("dflash_fc", "dflash_hidden_norm", "post_attention_norm"),
}
TAPS = (1, 3, 5)  # Luce's rule for 3 of 7 layers
MASK = 3
TENSORS = writers.draft_tensors(len(TAPS))
EXPECTED = writers.expected_tree(TENSORS)
# Changes to the metadata: the first of two layers slides.
WINDOW = {"A.attention.sliding_window": 8, "A.attention.sliding_window_pattern": [True, False]}


def name_of(family: str, name: str) -> str:
    fc, context, before_mlp = _OWN_NAMES[family]
    module, leaf = name.rsplit(".", 1)
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        theirs = before_mlp if module == "post_attention_layernorm" else writers.GGUF_NAMES[module]
        return f"blk.{layer}.{theirs}.{leaf}"
    return {"fc": fc, "hidden_norm": context, "norm": "output_norm"}[module] + f".{leaf}"


def metadata(family: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """changes: keys that begin with `A.` get the architecture; None removes."""
    taps = list(TAPS)
    shared = {
        "A.block_count": writers.LAYERS,
        "A.embedding_length": writers.HIDDEN,
        "A.feed_forward_length": writers.INTER,
        "A.context_length": 4096,
        "A.attention.head_count": writers.HEADS,
        "A.attention.head_count_kv": writers.KV_HEADS,
        "A.attention.key_length": writers.HEAD_DIM,
        "A.attention.value_length": writers.HEAD_DIM,
        "A.attention.layer_norm_rms_epsilon": 1e-6,
        "A.rope.freq_base": 1e6,
    }
    own: dict[str, dict[str, Any]] = {
        "upstream": {
            "A.block_size": writers.BLOCK,
            "A.target_layers": [tap + 1 for tap in taps],
            "tokenizer.ggml.mask_token_id": MASK,
        },
        "pre-merge": {"A.block_size": writers.BLOCK, "A.target_layers": taps, "A.mask_token_id": MASK},
        "luce": {
            "A.dflash.block_size": writers.BLOCK,
            "A.dflash.mask_token_id": MASK,
            "A.dflash.n_target_layers": len(taps),
            "A.vocab_size": writers.VOCAB,
        },
        "community": {
            "A.dflash.block_size": writers.BLOCK,
            "A.dflash.mask_token_id": MASK,
            "A.dflash.target_layer_ids": taps,
            "A.dflash.n_target_features": len(taps) * writers.HIDDEN,
            "A.attention.causal": False,
        },
    }
    keys = {"general.architecture": ARCHITECTURE[family]} | shared | own[family] | (changes or {})
    dashed = ((key, value) for key, value in keys.items() if value is not None)
    return {(ARCHITECTURE[family] + key[1:] if key.startswith("A.") else key): value for key, value in dashed}


def _packed(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [bool(), *_]:
            return struct.pack(f"<IIQ{len(value)}?", 9, 7, len(value), *value)
        case [int(), *_] | []:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    raise TypeError(value)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _padding(size: int) -> bytes:
    return bytes(-size % 32)


def file_bytes(keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> bytes:
    """tensors: by their name in the file, stored as F32."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(_text(key) + _packed(value) for key, value in keys.items())
    data = b""
    for name, value in tensors.items():
        head += _text(name) + struct.pack(f"<I{value.ndim}Q", value.ndim, *value.shape[::-1])
        head += struct.pack("<IQ", 0, len(data))
        data += np.ascontiguousarray(value, "<f4").tobytes()
        data += _padding(len(data))
    return head + _padding(len(head)) + data


def write(
    path: Path,
    family: str,
    tensors: dict[str, np.ndarray] | None = None,
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray | None] | None = None,
) -> Path:
    """keys: changes to the metadata. extra: tensors by their name in the file; None removes one."""
    named = {name_of(family, name): value for name, value in (tensors or TENSORS).items()} | (extra or {})
    kept = {name: value for name, value in named.items() if value is not None}
    path.write_bytes(file_bytes(metadata(family, keys), kept))
    return path


class _Bytes:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, code: str) -> tuple:
        values = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return values

    def text(self) -> str:
        (size,) = self.take("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()


_CODES = {4: "I", 5: "i", 6: "f", 7: "?"}


def parse(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, np.ndarray]]]:
    """Metadata, and {name: (type's number, bytes shaped as the matrix's rows)} of a file that is well formed."""
    file = _Bytes(path.read_bytes())
    assert file.data[:4] == b"GGUF"
    file.at = 4
    version, count, values = file.take("IQQ")
    assert version == 3
    keys: dict[str, Any] = {}
    for _ in range(values):
        key, (kind,) = file.text(), file.take("I")
        if kind == 8:
            keys[key] = file.text()
        elif kind == 9:
            kind, size = file.take("IQ")
            keys[key] = (
                [file.text() for _ in range(size)] if kind == 8 else [*file.take(f"{size}{_CODES[kind]}")]
            )
        else:
            (keys[key],) = file.take(_CODES[kind])
    entries = []
    for _ in range(count):
        name, (axes,) = file.text(), file.take("I")
        shape = file.take(f"{axes}Q")[::-1]
        entries.append((name, shape, *file.take("IQ")))
    begin = -(-file.at // 32) * 32
    ends = [offset for *_, offset in entries[1:]] + [len(file.data) - begin]
    data = np.frombuffer(file.data, np.uint8)
    tensors = {}
    for (name, shape, kind, offset), end in zip(entries, ends, strict=True):
        raw = data[begin + offset : begin + end]
        if kind == 0:
            raw = raw[: 4 * int(np.prod(shape))].view("<f4").reshape(shape)
        tensors[name] = (kind, raw)
    return keys, tensors
