"""Names of parameters: ours, Hugging Face's, GGUF's. One table a model, read in both directions.

Ours are dotted paths of the parameter tree: Hugging Face's names with `layers.{i}` written `layers_{i}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# (ours, Hugging Face, GGUF) of each module; {i} is the layer. Layers that drafts have too:
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
# Modules that only targets have: gated delta layers, routers and shared experts.
_TARGET_LAYER = (
    *_LAYER,
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_a", "linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.in_proj_b", "linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.conv1d", "linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "linear_attn.out_proj", "ssm_out"),
    ("mlp.gate", "mlp.gate", "ffn_gate_inp"),
    ("mlp.shared_expert.gate_proj", "mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
)
# Parameters whose names do not end in `.weight` or `.bias` everywhere.
_TARGET_LAYER_PARAMETERS = (
    ("linear_attn.A_log", "linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "linear_attn.dt_bias", "ssm_dt.bias"),
    ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight"),
    ("mlp.experts.down_proj", "mlp.experts.down_proj", "ffn_down_exps.weight"),
)


def _in_layer(rows: tuple[tuple[str, str, str], ...]) -> tuple[tuple[str, str, str], ...]:
    return tuple((f"layers_{{i}}.{a}", f"model.layers.{{i}}.{b}", f"blk.{{i}}.{c}") for a, b, c in rows)


_TARGET = (
    ("embed_tokens", "model.embed_tokens", "token_embd"),
    *_in_layer(_TARGET_LAYER),
    ("norm", "model.norm", "output_norm"),
    ("lm_head", "lm_head", "output"),
)
_TARGET_PARAMETERS = _in_layer(_TARGET_LAYER_PARAMETERS)
_DRAFT = (
    ("fc", "fc"),
    ("hidden_norm", "hidden_norm"),
    *((f"layers_{{i}}.{a}", f"layers.{{i}}.{b}") for a, b, _ in _LAYER),
    ("norm", "norm"),
)

_LAYER_NUMBER = re.compile(r"(?:(?<=layers[_.])|(?<=blk\.))(?:0|[1-9]\d*)(?=\.)")


class Names:
    """One direction-free table between our paths and a file's names."""

    def __init__(
        self, modules: Iterable[tuple[str, str]], parameters: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._to = {
            f"{ours}.{leaf}": f"{theirs}.{leaf}" for ours, theirs in modules for leaf in ("weight", "bias")
        } | dict(parameters)
        self._back = {theirs: ours for ours, theirs in self._to.items()}

    def to_file(self, path: str) -> str:
        """The file's name of a parameter. KeyError for a path that no model here has."""
        template, layer = _split(path)
        return _fill(self._to[template], layer)

    def from_file(self, name: str) -> str | None:
        """Our path of a tensor, None for a name that is not in the table."""
        template, layer = _split(name)
        return _fill(self._back[template], layer) if template in self._back else None


def _split(name: str) -> tuple[str, str]:
    """'layers.7.mlp.up_proj' -> 'layers.{i}.mlp.up_proj', '7'."""
    match = _LAYER_NUMBER.search(name)
    if match is None:
        return name, ""
    return f"{name[: match.start()]}{{i}}{name[match.end() :]}", match.group()


def _fill(template: str, layer: str) -> str:
    return template.replace("{i}", layer)


def _gguf(module: str, hybrid: bool) -> str:
    """Qwen3.5's converter keeps the norm after attention under Hugging Face's name."""
    return module.replace(".ffn_norm", ".post_attention_norm") if hybrid else module


def target_gguf(hybrid: bool) -> Names:
    return Names(
        ((ours, _gguf(gguf, hybrid)) for ours, _, gguf in _TARGET),
        ((ours, gguf) for ours, _, gguf in _TARGET_PARAMETERS),
    )


def draft_gguf(fc: str, hidden_norm: str, ffn_norm: str) -> Names:
    """The dialects of GGUF drafts differ in three names."""
    layers = ((a, ffn_norm if c == "ffn_norm" else c) for a, _, c in _LAYER)
    blocks = ((f"layers_{{i}}.{ours}", f"blk.{{i}}.{theirs}") for ours, theirs in layers)
    return Names([("fc", fc), ("hidden_norm", hidden_norm), *blocks, ("norm", "output_norm")])


TARGET_HF = Names(((ours, hf) for ours, hf, _ in _TARGET), ((ours, hf) for ours, hf, _ in _TARGET_PARAMETERS))
TARGET_GGUF = target_gguf(hybrid=False)
TARGET_GGUF_HYBRID = target_gguf(hybrid=True)
DRAFT_HF = Names(_DRAFT)
