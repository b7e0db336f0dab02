"""`config.json` of a draft: three schemas are read, one is written. Of a target: what is written, and the
fields that it shares with drafts: RoPE and sliding windows.

    legacy   block_size at the top; dflash_config: {mask_token_id, target_layer_ids}
    nested   dflash_config: {block_size, mask_token_id, target_layer_ids}        (written here)
    flat     block_size, mask_token_id, target_layer_ids at the top, no dflash_config

Sources: z-lab/dflash `model.py`; transformers 5 `modeling_rope_utils.py` and the model
`muse_glimmer_assistant` (flat schema).
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from dflash_jax.config import (
    FULL,
    SLIDING,
    ConfigError,
    DraftConfig,
    RopeConfig,
    TargetConfig,
    Training,
    default_taps,
)
from dflash_jax.weights.fields import MAX_LAYERS, Fields, naming, read_json

ARCHITECTURE = "DFlashDraftModel"
# The flat schema's first user: a DFlash draft by another name. Its class is never causal and always
# windowed, so its config carries neither flag.
_ASSISTANT = "MuseGlimmerAssistantModel"


def folder_config(folder: Path) -> Fields:
    """The fields of `folder/config.json`."""
    if folder.is_file():
        raise ConfigError(f"{folder}: is a file: a Hugging Face model is a folder with config.json")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"{folder}: has no config.json: not a model folder")
    return Fields(path, read_json(path))


def architectures(fields: Fields) -> tuple[str, ...]:
    return fields.texts("architectures", ())


# --- RoPE ---------------------------------------------------------------------------------------------


def read_rope(fields: Fields, max_positions: int, partial: bool = False) -> RopeConfig:
    """RoPE as transformers 5 reads it: theta is that of the section of RoPE, else the top level's, and
    nowhere is an error (transformers would take 10000). partial: a part of a head may rotate, which
    `read_rotary_dim` reads."""
    section = _rope_section(fields)
    theta = section.number("rope_theta", None)
    if theta is None:
        theta = fields.number("rope_theta", None)
    if theta is None:
        raise fields.error("rope_theta", "is missing here, in rope_parameters and in rope_scaling: add it")
    for where in (section, fields):
        if not partial and where.number("partial_rotary_factor", 1.0) != 1.0:
            raise where.error(
                "partial_rotary_factor", "rotates a part of each head: not supported for this model"
            )

    kind = section.text("rope_type", None) or section.text("type", None) or "default"
    values: dict[str, Any] = {"theta": theta, "type": kind}
    if kind in ("linear", "llama3", "yarn"):
        values["factor"] = section.number("factor")
    if kind in ("llama3", "yarn"):
        # transformers lets the top level win here (Phi3 keeps it there)
        original = fields.integer("original_max_position_embeddings", None)
        if original is None:
            original = section.integer("original_max_position_embeddings", max_positions)
        values["original_max_positions"] = original
    if kind == "llama3":
        values["low_freq_factor"] = section.number("low_freq_factor")
        values["high_freq_factor"] = section.number("high_freq_factor")
    if kind == "yarn":
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            values[key] = section.number(key, None)
        # 0 counts as absent, as in transformers
        values["beta_fast"] = section.number("beta_fast", 0.0) or 32.0
        values["beta_slow"] = section.number("beta_slow", 0.0) or 1.0
        values["truncate"] = section.flag("truncate", True)
    with naming(fields.file):
        return RopeConfig(**values)


def read_rotary_dim(fields: Fields, head_dim: int) -> int:
    """How many of a head's dimensions rotate, the first ones: by transformers' default for Qwen3.5 a
    quarter."""
    section = _rope_section(fields)
    where = section if "partial_rotary_factor" in section else fields
    rotary = int(head_dim * where.number("partial_rotary_factor", 0.25))
    if rotary < 2:
        raise where.error("partial_rotary_factor", f"rotates {rotary} of {head_dim} dimensions: too few")
    return rotary


def _rope_section(fields: Fields) -> Fields:
    """A non-empty `rope_scaling` replaces `rope_parameters`."""
    section = fields.section("rope_scaling")
    return section if section.values else _one_rope(fields.section("rope_parameters"))


def _one_rope(section: Fields) -> Fields:
    """`rope_parameters` may be given per layer type; models here have one for all layers."""
    if not section.values or not set(section.values) <= {FULL, SLIDING}:
        return section
    parts = [section.section(key) for key in section.values]
    if any(part.values != parts[0].values for part in parts):
        raise section.error(
            "sliding_attention", "differs from full_attention: one rope for all layers is supported"
        )
    return parts[0]


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_parameters` of transformers 5."""
    if rope.divisors:
        raise ConfigError("rope divisors (GGUF rope_freqs) have no form in a Hugging Face config")
    written: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.type}
    if rope.type != "default":
        written["factor"] = rope.factor
    if rope.type in ("llama3", "yarn"):
        written["original_max_position_embeddings"] = rope.original_max_positions
    if rope.type == "llama3":
        written |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        written |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {k: getattr(rope, k) for k in ("attention_factor", "mscale", "mscale_all_dim")}
        written |= {key: value for key, value in optional.items() if value is not None}
    return written


# --- drafts: read -------------------------------------------------------------------------------------


def read_draft(folder: Path) -> DraftConfig:
    """The config of a draft folder, in any of the three schemas.

    Warns (UserWarning) where the file leaves a choice that the reference makes silently: two different
    block sizes, no taps, sliding layers whose window is off. Raises ConfigError for other kinds of
    draft, by name, and for fields that are missing or do not fit.
    """
    fields = folder_config(folder)
    own = fields.section("dflash_config")
    _refuse_others(fields, own)
    layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    depth = _lookup(fields, own, "num_target_layers").integer("num_target_layers", most=MAX_LAYERS)
    max_positions = fields.integer("max_position_embeddings", 0)
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"is '{activation}': drafts here use silu")
    is_assistant = _ASSISTANT in architectures(fields)
    layer_types = fields.texts("layer_types", (SLIDING if is_assistant else FULL,) * layers)
    causal = fields.flag("is_causal", False if is_assistant else None)

    def optional(key: str, default: float) -> float:
        return _lookup(fields, own, key).number(key, default)

    with naming(fields.file):
        return DraftConfig(
            hidden_size=fields.integer("hidden_size"),
            num_layers=layers,
            num_heads=fields.integer("num_attention_heads"),
            num_kv_heads=fields.integer("num_key_value_heads"),
            head_dim=fields.integer("head_dim"),
            intermediate_size=fields.integer("intermediate_size"),
            vocab_size=fields.integer("vocab_size"),
            rope=read_rope(fields, max_positions),
            block_size=_lookup(fields, own, "block_size").integer("block_size"),
            mask_token_id=_lookup(fields, own, "mask_token_id").integer("mask_token_id"),
            taps=_read_taps(fields, own, depth, layers),
            num_target_layers=depth,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            attention_bias=fields.flag("attention_bias", False),
            layer_types=layer_types,
            causal=() if causal is None else (causal,) * layers,
            sliding_window=_read_window(fields, layer_types),
            embedding_scale=optional("input_embedding_scale", 1.0),
            logit_scale=optional("output_multiplier", 1.0),
            softcap=max(optional("final_logit_softcapping", 0.0), 0.0),
            max_positions=max_positions,
            training=_read_training(own.section("training")),
        )


def _refuse_others(fields: Fields, own: Fields) -> None:
    """Only DFlash drafts pass: related models load without an error and then draft nonsense."""
    names = architectures(fields)
    keys = [key for part in (fields, own) for key in part.values if part.values[key]]
    if any("DSpark" in name for name in names) or any(key.startswith("markov_") for key in keys):
        other = "a DSpark draft, which adds a Markov head"
    elif any("DFlash2" in name for name in names) or {"selector_rank", "conv_kernel_size"} & set(keys):
        other = "a DFlash 2 draft (DFlash2DraftModel), which adds convolutions and a candidate selector"
    elif any(key.startswith("speculators_") for key in keys) or "aux_hidden_state_layer_ids" in fields:
        other = "a speculators checkpoint, with taps shifted by one and a head of its own"
    elif ARCHITECTURE in names or _ASSISTANT in names:
        return
    elif not names:
        raise fields.error("architectures", f"is missing: a draft has ['{ARCHITECTURE}']")
    else:
        other = f"{', '.join(names)}, not a DFlash draft ({ARCHITECTURE})"
    raise ConfigError(f"{fields.file}: this is {other}: not supported as a draft")


def _lookup(fields: Fields, own: Fields, key: str) -> Fields:
    """The section that holds a draft's key: `dflash_config` first, then the top level."""
    if key not in own:
        return fields
    if key in fields and fields.get(key) != own.get(key):
        _warn(
            f"{fields.file}: {key} is {own.get(key)} in dflash_config and {fields.get(key)} at the top "
            "level: dflash_config wins"
        )
    return own


def _read_taps(fields: Fields, own: Fields, depth: int, layers: int) -> tuple[int, ...]:
    taps = _lookup(fields, own, "target_layer_ids").integers("target_layer_ids", None)
    if taps is not None:
        return taps
    if depth < 1:
        raise fields.error("num_target_layers", "is 0: it must be positive")
    taps = default_taps(depth, layers)
    _warn(
        f"{fields.file}: names no target_layer_ids: taking {list(taps)}, as the reference does for a target "
        f"of {depth} layers"
    )
    return taps


def _read_window(fields: Fields, layer_types: tuple[str, ...]) -> int | None:
    if SLIDING not in layer_types:
        return None
    if fields.flag("use_sliding_window", _ASSISTANT in architectures(fields)):
        window = fields.integer("sliding_window")
        if window < 1:
            raise fields.error("sliding_window", f"is {window}: it must be positive")
        return window
    _warn(
        f"{fields.file}: layer_types has sliding layers but use_sliding_window is not true: like the "
        "reference, these layers have no window (and are causal unless is_causal says otherwise)"
    )
    return None


def _read_training(section: Fields) -> Training:
    return Training(
        loss_decay=section.number("loss_decay", None),
        num_anchors=section.integer("num_anchors", None),
        target_name=section.text("target_name", None),
        target_hash=section.text("target_hash", None),
    )


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


# --- drafts: write ------------------------------------------------------------------------------------


def write_draft(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """`config.json` of a draft in the nested schema, readable by z-lab's model, vLLM and SGLang.

    dtype: the name of the weights' dtype, as torch writes it. Training facts that z-lab has no key for
    are in `dflash_config.training`, which other readers ignore.
    """
    default = tuple(kind == SLIDING for kind in config.layer_types)
    if len(set(config.causal)) > 1 and config.causal != default:
        raise ConfigError(
            "draft causality differs between layers of one type: is_causal is one flag for all layers in "
            "a Hugging Face config"
        )
    training = {k: v for k, v in dataclasses.asdict(config.training).items() if v is not None}
    own: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps),
    }
    optional: dict[str, Any] = {}
    if config.embedding_scale != 1.0:
        optional["input_embedding_scale"] = config.embedding_scale
    if config.logit_scale != 1.0:
        optional["output_multiplier"] = config.logit_scale
    if config.softcap:
        optional["final_logit_softcapping"] = config.softcap
    if len(set(config.causal)) == 1:
        optional["is_causal"] = config.causal[0]
    if config.max_positions:
        optional["max_position_embeddings"] = config.max_positions
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "layer_types": list(config.layer_types),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "rope_parameters": write_rope(config.rope),
        "torch_dtype": dtype,
        **optional,
        "dflash_config": own | ({"training": training} if training else {}),
    }


# --- targets: write -----------------------------------------------------------------------------------


def write_target(config: TargetConfig, architecture: str, dtype: str) -> dict[str, Any]:
    """`config.json` of a target as transformers 5 writes it. hf.target_config reads it."""
    values: dict[str, Any] = {
        "architectures": [architecture],
        # the text model of a family that has eyes too
        "model_type": config.family + "_text" * (config.recurrent is not None),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
        # qwen2 has its biases whatever this says, and with it transformers' qwen2 would still have none on o
        "attention_bias": config.attention_out_bias,
        "attention_dropout": 0.0,
        "rope_parameters": write_rope(config.rope),
        "torch_dtype": dtype,
    }
    if config.family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if SLIDING in config.layer_types:
        values |= {"use_sliding_window": True, "sliding_window": config.sliding_window}
    if (r := config.recurrent) is not None:
        values["rope_parameters"]["partial_rotary_factor"] = config.rotary_dim / config.head_dim
        values |= {
            "linear_num_key_heads": r.key_heads,
            "linear_num_value_heads": r.value_heads,
            "linear_key_head_dim": r.key_dim,
            "linear_value_head_dim": r.value_dim,
            "linear_conv_kernel_dim": r.conv_width,
        }
    if (m := config.moe) is not None:
        values |= {
            "num_experts": m.experts,
            "num_experts_per_tok": m.per_token,
            "moe_intermediate_size": m.intermediate_size,
        }
        if config.family == "qwen3_moe":
            dense = [i for i, routed in enumerate(m.layers) if not routed]
            values |= {"norm_topk_prob": m.normalise, "decoder_sparse_step": 1, "mlp_only_layers": dense}
        else:
            values["shared_expert_intermediate_size"] = m.shared_intermediate_size
    return values | {"layer_types": list(config.layer_types)}
