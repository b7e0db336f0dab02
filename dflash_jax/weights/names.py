"""Names of parameters: ours, Hugging Face's, GGUF's. One table a model, read in both directions.

Ours are dotted paths of the parameter tree: Hugging Face's names with `layers.{i}` written `layers_{i}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# (ours, Hugging Face, GGUF) of each module; {i} is the layer.
_LAYER = (
    ("input_layernorm", "input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "mlp.down_proj", "ffn_down"),
)
_TARGET = (
    ("embed_tokens", "model.embed_tokens", "token_embd"),
    *((f"layers_{{i}}.{a}", f"model.layers.{{i}}.{b}", f"blk.{{i}}.{c}") for a, b, c in _LAYER),
    ("norm", "model.norm", "output_norm"),
    ("lm_head", "lm_head", "output"),
)
# GGUF drafts come in three dialects (llama.cpp, Luce, community), each with names of its own.
_DRAFT = (
    ("fc", "fc"),
    ("hidden_norm", "hidden_norm"),
    *((f"layers_{{i}}.{a}", f"layers.{{i}}.{b}") for a, b, _ in _LAYER),
    ("norm", "norm"),
)

_LAYER_NUMBER = re.compile(r"(?:(?<=layers[_.])|(?<=blk\.))(?:0|[1-9]\d*)(?=\.)")


class Names:
    """One direction-free table between our paths and a file's names."""

    def __init__(self, modules: Iterable[tuple[str, str]]) -> None:
        self._to = dict(modules)
        self._back = {theirs: ours for ours, theirs in self._to.items()}

    def to_file(self, path: str) -> str:
        """The file's name of a parameter. KeyError for a path that no model here has."""
        module, leaf = path.rsplit(".", 1)
        template, layer = _split(module)
        return f"{_fill(self._to[template], layer)}.{leaf}"

    def from_file(self, name: str) -> str | None:
        """Our path of a tensor, None for a name that is not in the table."""
        module, _, leaf = name.rpartition(".")
        template, layer = _split(module)
        ours = self._back.get(template)
        if ours is None or leaf not in ("weight", "bias"):
            return None
        return f"{_fill(ours, layer)}.{leaf}"


def _split(module: str) -> tuple[str, str]:
    """'layers.7.mlp.up_proj' -> 'layers.{i}.mlp.up_proj', '7'."""
    match = _LAYER_NUMBER.search(module)
    if match is None:
        return module, ""
    return f"{module[: match.start()]}{{i}}{module[match.end() :]}", match.group()


def _fill(template: str, layer: str) -> str:
    return template.replace("{i}", layer)


TARGET_HF = Names((ours, hf) for ours, hf, _ in _TARGET)
TARGET_GGUF = Names((ours, gguf) for ours, _, gguf in _TARGET)
DRAFT_HF = Names(_DRAFT)
