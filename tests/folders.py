"""Tiny models in Hugging Face folders, with a tokenizer: what the command line reads.

The vocabulary is the 256 bytes in their byte-level form (the id of a byte is its value) and four special
tokens. Folders are written by hand (writers.py), not by the code under test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import writers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, IM_START, IM_END, MASK = 256, 257, 258, 259
SPECIAL = {END: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>", MASK: "<|mask|>"}
VOCAB = 260
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, LAYERS = 32, 4, 2, 8, 48, 2
BLOCK, TAPS = 4, [0, 1]
CONTEXT = 512
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHAPE = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTER,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}


def bytes_in_text() -> dict[int, str]:
    """GPT-2's printable character of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def write_tokenizer(folder: Path, template: str | None = CHATML) -> None:
    vocabulary = {text: byte for byte, text in bytes_in_text().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL.values()])
    assert [backend.token_to_id(text) for text in SPECIAL.values()] == list(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIAL[IM_END]} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _layer(rng: np.random.Generator, prefix: str, norms: bool, scale: float) -> dict[str, np.ndarray]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = {
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "mlp.gate_proj": (INTER, HIDDEN),
        "mlp.up_proj": (INTER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTER),
    }
    vectors = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    if norms:
        vectors |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    tensors = {f"{name}.weight": scale * rng.standard_normal(s, np.float32) for name, s in matrices.items()}
    tensors |= {f"{name}.weight": np.ones(size, np.float32) for name, size in vectors.items()}
    return {prefix + name: value for name, value in tensors.items()}


def target(folder: Path, *, says: int | None = None, template: str | None = CHATML, **changes: Any) -> Path:
    """A random llama that babbles bytes; with `says` (a token id), one whose layers hardly matter and that
    says this token for ever, as does every draft on top of it."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((VOCAB, HIDDEN), np.float32)
    head = 0.3 * rng.standard_normal((VOCAB, HIDDEN), np.float32)
    scale = 0.3
    if says is not None:
        table, scale = np.abs(table), 0.001
        head[says] = 1.0
    tensors = {"model.embed_tokens.weight": table}
    if not changes.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = head
    for i in range(LAYERS):
        tensors |= _layer(rng, f"model.layers.{i}.", norms=False, scale=scale)
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    config = writers.target_json("llama", num_hidden_layers=LAYERS, **_SHAPE)
    writers.hf_folder(folder, writers.changed(config, changes), tensors)
    write_tokenizer(folder, template)
    return folder


def draft(folder: Path, **changes: Any) -> Path:
    """A draft for these targets. Its random layers are weak, so that it follows a target that `says`."""
    rng = np.random.default_rng(1)
    tensors = {
        "fc.weight": 0.1 * rng.standard_normal((HIDDEN, len(TAPS) * HIDDEN), np.float32),
        "hidden_norm.weight": np.ones(HIDDEN, np.float32),
        "norm.weight": np.ones(HIDDEN, np.float32),
        **_layer(rng, "layers.0.", norms=True, scale=0.001),
    }
    own = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": TAPS}
    config = writers.draft_json(num_hidden_layers=1, num_target_layers=LAYERS, dflash_config=own, **_SHAPE)
    return writers.hf_folder(folder, writers.changed(config, changes), tensors)
