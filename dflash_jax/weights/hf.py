"""Hugging Face folders, read and written: targets, and drafts in three schemas (written in one)."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dflash_jax.config import (
    FULL,
    RECURRENT,
    SLIDING,
    ConfigError,
    DraftConfig,
    MoeConfig,
    RecurrentConfig,
    TargetConfig,
)
from dflash_jax.weights import safetensors_file
from dflash_jax.weights.atomic import replacing
from dflash_jax.weights.draft_check import check_params, fusion_problems, refuse_others
from dflash_jax.weights.fields import MAX_LAYERS, Fields, naming
from dflash_jax.weights.names import DRAFT_HF, TARGET_HF
from dflash_jax.weights.schema import (
    ARCHITECTURE,
    architectures,
    folder_config,
    read_draft,
    read_rope,
    read_rotary_dim,
    write_draft,
    write_target,
)
from dflash_jax.weights.tensors import Tensor, Wanted, check, flatten, load, wanted

# What is written is the first of a family.
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
_HYBRID = ("qwen3_5", "qwen3_5_moe")
_ROUTED = ("qwen3_moe", "qwen3_5_moe")

# Buffers that old checkpoints store and that follow from the config.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# The parts of a Qwen3.5 checkpoint that text does not go through: the vision tower, the layers that
# predict several tokens.
_NOT_TEXT = re.compile(r"((model\.)?visual|mtp)\..*")
# Where the text model lies in a checkpoint that has a vision tower too; the head is at the root.
_TEXT = re.compile(r"^(model\.language_model\.|language_model\.model\.)")
# One expert's own tensor, and the module that it is part of.
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.\d+\.")


# --- targets ------------------------------------------------------------------------------------------


def target_config(folder: str | Path) -> TargetConfig:
    """Read `config.json` of a folder whose architecture is one of FAMILIES.

    Raises ConfigError for other architectures and for fields that are missing or not supported.
    """
    root = folder_config(Path(folder))
    family = _family(root)
    hybrid = family in _HYBRID
    # a model with a vision tower keeps what concerns its text model in a section
    fields = root.section("text_config") if hybrid and "text_config" in root else root
    for where in (root, fields):
        if "quantization_config" in where:
            raise where.error(
                "quantization_config", "marks quantised weights: use the float checkpoint or a GGUF file"
            )
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"is '{activation}': {family} models here use silu")

    layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings", 0)
    head_dim = _head_dim(fields, family, hidden, heads)
    bias = fields.flag("attention_bias", False)
    tied = fields.flag("tie_word_embeddings", False)
    layer_types, window = _interval(fields, layers) if hybrid else _sliding(fields, family, layers)
    with naming(fields.file):
        return TargetConfig(
            family=family,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            # Qwen3.5's routed models have no dense MLP anywhere: the experts' size stands for it
            intermediate_size=fields.integer(
                "moe_intermediate_size" if family == "qwen3_5_moe" else "intermediate_size"
            ),
            vocab_size=fields.integer("vocab_size"),
            rope=read_rope(fields, max_positions, partial=hybrid),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=root.flag("tie_word_embeddings", tied),
            # Qwen2 has biases on q, k and v whatever its config says, and never on o
            attention_bias=bias or family == "qwen2",
            attention_out_bias=bias and family != "qwen2",
            mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
            layer_types=layer_types,
            sliding_window=window,
            max_positions=max_positions,
            rotary_dim=read_rotary_dim(fields, head_dim) if hybrid else 0,
            recurrent=_recurrent(fields) if hybrid else None,
            moe=_moe(fields, family, layers) if family in _ROUTED else None,
        )


def _family(fields: Fields) -> str:
    names = architectures(fields)
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    known = ", ".join(FAMILIES)
    if ARCHITECTURE in names:
        raise ConfigError(f"{fields.file}: this is a DFlash draft, not a target: pass it as the draft")
    if not names:
        raise fields.error("architectures", f"is missing: one of {known} is needed")
    raise fields.error(
        "architectures", f"is {', '.join(names)}: not supported as a target, one of {known} is"
    )


def _head_dim(fields: Fields, family: str, hidden: int, heads: int) -> int:
    """Llama, Qwen2 and Qwen3-MoE define an absent head_dim as hidden / heads; the others always write it."""
    if "head_dim" in fields or family not in ("llama", "qwen2", "qwen3_moe"):
        return fields.integer("head_dim")
    if heads == 0 or hidden % heads:
        raise fields.error(
            "hidden_size", f"is {hidden}, not a multiple of {heads} heads, and head_dim is absent"
        )
    return hidden // heads


def _sliding(fields: Fields, family: str, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Layer types and window, by the rules of transformers' config classes: Llama has no windows; the others
    have them only with `use_sliding_window`: Qwen3-MoE in all layers, Qwen2 and Qwen3 from layer
    `max_window_layers` on unless `layer_types` says where."""
    full = (FULL,) * layers
    named = fields.texts("layer_types", None)
    if family == "qwen3_moe":
        window = fields.integer("sliding_window") if fields.flag("use_sliding_window", False) else None
        uniform = full if window is None else (SLIDING,) * layers
        if named not in (None, uniform):
            raise fields.error(
                "layer_types", f"differs from the {uniform[0]} that Qwen3-MoE has in all layers"
            )
        return uniform, window
    if family == "llama":
        if named is not None and SLIDING in named:
            raise fields.error("layer_types", "has sliding layers, which LlamaForCausalLM does not define")
        return named or full, None
    if not fields.flag("use_sliding_window", False):
        if named is not None and SLIDING in named:
            warnings.warn(
                f"{fields.file}: layer_types has sliding layers but use_sliding_window is not true: "
                "as in transformers, all layers see everything",
                stacklevel=3,
            )
            named = tuple(FULL if kind == SLIDING else kind for kind in named)
        return named or full, None
    if named is None:
        first = fields.integer("max_window_layers")
        named = tuple(SLIDING if i >= first else FULL for i in range(layers))
    return named, fields.integer("sliding_window") if SLIDING in named else None


def _interval(fields: Fields, layers: int) -> tuple[tuple[str, ...], None]:
    """Layer types of a hybrid model: named, or attention in every `full_attention_interval`-th layer."""
    interval = fields.integer("full_attention_interval", 4)
    if interval < 1:
        raise fields.error("full_attention_interval", f"is {interval}: it must be positive")
    counted = tuple(RECURRENT if (i + 1) % interval else FULL for i in range(layers))
    named = fields.texts("layer_types", counted)
    if SLIDING in named:
        raise fields.error("layer_types", "has sliding layers, which Qwen3.5 does not define")
    return named, None


def _recurrent(fields: Fields) -> RecurrentConfig:
    if not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate", "is false: attention without an output gate is not supported")
    return RecurrentConfig(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim"),
    )


def _moe(fields: Fields, family: str, layers: int) -> MoeConfig:
    """Qwen3-MoE says which layers have experts and whether their weights are normalised; in Qwen3.5-MoE all
    have them, beside a shared one, normalised."""
    # transformers 5 writes Qwen3-MoE's number of experts by another name than the published files
    count = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    shape = (
        fields.integer(count),
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
    )
    if family == "qwen3_5_moe":
        return MoeConfig(*shape, (True,) * layers, fields.integer("shared_expert_intermediate_size"))
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers", ())
    if step < 1:
        raise fields.error("decoder_sparse_step", f"is {step}: it must be positive")
    if beyond := [i for i in dense if not 0 <= i < layers]:
        raise fields.error("mlp_only_layers", f"names layer {beyond[0]} of {layers}")
    routed = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    return MoeConfig(*shape, routed, normalise=fields.flag("norm_topk_prob", False))


def load_target(
    folder: str | Path, config: TargetConfig, abstract: Mapping[str, Any], dtype: DTypeLike
) -> dict[str, Any]:
    """Parameters of a target as numpy arrays in `dtype`, shaped as `abstract` (targets.abstract_params).

    Raises one ConfigError that lists all missing, unknown and misshapen tensors.
    """
    found = _target_tensors(Path(folder), config)
    return load(folder, found, _expected(found, abstract), dtype)


def check_target(folder: str | Path, config: TargetConfig, abstract: Mapping[str, Any]) -> None:
    """The errors of load_target, from the files' headers alone."""
    found = _target_tensors(Path(folder), config)
    check(folder, found, _expected(found, abstract))


def _expected(found: Iterable[str], abstract: Mapping[str, Any]) -> dict[str, Wanted]:
    """What a target's folder must hold. A layer's experts are fused, or one by one if any of them is."""
    alone = {match[1] for name in found if (match := _EXPERT.match(name))}
    return _split(wanted(abstract, TARGET_HF.to_file), alone)


def _split(wants: Mapping[str, Wanted], alone: Container[str]) -> dict[str, Wanted]:
    """`wants` with the experts of the modules in `alone` one by one."""
    split: dict[str, Wanted] = {}
    for name, want in wants.items():
        module, _, kind = name.rpartition(".")
        split |= _one_by_one(module, kind, want) if module in alone else {name: want}
    return split


def _one_by_one(module: str, kind: str, want: Wanted) -> dict[str, Wanted]:
    """The parameter [E, out, in] from one tensor an expert, or two: gate_up_proj has the gate's rows first."""
    experts, rows, columns = want.shape
    half = rows // 2
    parts = {"gate_proj": slice(0, half), "up_proj": slice(half, rows)}
    if kind == "down_proj":
        parts = {"down_proj": slice(0, rows)}
    return {
        f"{module}.{expert}.{name}.weight": Wanted(
            want.path, (part.stop - part.start, columns), whole=want.shape, part=(expert, part)
        )
        for expert in range(experts)
        for name, part in parts.items()
    }


def _target_tensors(folder: Path, config: TargetConfig) -> dict[str, Tensor]:
    found = safetensors_file.read_folder(folder)
    found = {name: tensor for name, tensor in found.items() if not _IGNORED.fullmatch(name)}
    if config.family in _HYBRID:
        found = _text_model(folder, found)
    if config.tie_word_embeddings:
        _drop_tied_head(folder, found)
    return found


def _text_model(folder: Path, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the text model, by the names that they have in a checkpoint of nothing else."""
    kept: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if _NOT_TEXT.fullmatch(name):
            continue
        bare = _TEXT.sub("model.", name, count=1)
        if bare in kept:
            raise ConfigError(f"{folder}: tensors {kept[bare].name} and {name} are both {bare}")
        kept[bare] = tensor
    return kept


def _drop_tied_head(folder: Path, found: dict[str, Tensor]) -> None:
    """Some writers store the head although it is tied; it must then be the embedding itself."""
    head, table = found.pop("lm_head.weight", None), found.get("model.embed_tokens.weight")
    if head is None or table is None:
        return
    if head.kind != table.kind or not np.array_equal(head.raw, table.raw):
        raise ConfigError(
            f"{folder}: tie_word_embeddings is true but lm_head.weight differs from "
            "model.embed_tokens.weight: set it to false to use both"
        )


def save_target(
    folder: str | Path, config: TargetConfig, params: Mapping[str, Any], dtype: DTypeLike
) -> None:
    """Write a target's config.json and weights, in `dtype`; the tokenizer's files are the caller's.

    An interrupted save leaves a folder without config.json, which every reader refuses. ConfigError for
    what has no form in such a config (rope divisors, which only GGUF has).
    """
    architecture = next(name for name, family in FAMILIES.items() if family == config.family)
    values = write_target(config, architecture, np.dtype(dtype).name)
    wants = wanted(params, TARGET_HF.to_file)
    if config.family == "qwen3_moe":  # published one by one, Qwen3.5-MoE fused
        wants = _split(wants, {name.rpartition(".")[0] for name in wants if ".mlp.experts." in name})
    flat = {path: np.asarray(value) for path, value in flatten(params).items()}
    by_path = sorted(wants.items(), key=lambda item: item[1].path)
    tensors = {name: flat[want.path][want.part] for name, want in by_path}
    _save(Path(folder), values, tensors, np.dtype(dtype))


# --- drafts -------------------------------------------------------------------------------------------

# The flat schema keeps the fusion in an encoder of its own.
_FLAT = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def draft_config(folder: str | Path) -> DraftConfig:
    """Read `config.json` of a draft folder: legacy, nested or flat schema. See schema.read_draft."""
    return read_draft(Path(folder))


def load_draft(
    folder: str | Path, config: DraftConfig, abstract: Mapping[str, Any], dtype: DTypeLike
) -> dict[str, Any]:
    """Parameters of a draft as numpy arrays in `dtype`, shaped as `abstract` (drafts.abstract_params).

    Raises one ConfigError that lists all missing, unknown and misshapen tensors; tensors of another
    kind of draft are refused by its name.
    """
    found = _draft_tensors(Path(folder))
    problems = fusion_problems(found.get("fc.weight"), config)
    return load(folder, found, wanted(abstract, DRAFT_HF.to_file), dtype, problems)


def check_draft(folder: str | Path, config: DraftConfig, abstract: Mapping[str, Any]) -> None:
    """The errors of load_draft, from the files' headers alone."""
    found = _draft_tensors(Path(folder))
    problems = fusion_problems(found.get("fc.weight"), config)
    check(folder, found, wanted(abstract, DRAFT_HF.to_file), problems)


def _draft_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors by the names of the nested schema."""
    found: dict[str, Tensor] = {}
    tensors = safetensors_file.read_folder(folder)
    refuse_others(folder, "tensor", tensors)
    for name, tensor in tensors.items():
        bare = name.removeprefix("model.")
        bare = _FLAT.get(bare, bare)
        if bare in found:
            raise ConfigError(f"{folder}: tensors {found[bare].name} and {name} are both {bare}")
        found[bare] = tensor
    return found


def save_draft(folder: str | Path, config: DraftConfig, params: Mapping[str, Any], dtype: DTypeLike) -> None:
    """Write a draft in the nested schema, with weights in `dtype` (bfloat16 is what others expect).

    The folder is created where absent; other files in it stay. An interrupted save leaves the old
    draft or a folder without config.json, which every reader refuses: never a mixture.
    """
    folder = Path(folder)
    values = write_draft(config, np.dtype(dtype).name)
    flat = flatten(params)
    check_params(folder, config, flat)
    tensors = {DRAFT_HF.to_file(path): np.asarray(value) for path, value in sorted(flat.items())}
    _save(folder, values, tensors, np.dtype(dtype))


def _save(folder: Path, values: dict[str, Any], tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> None:
    """config.json last: a folder without it is refused by every reader."""
    tensors = {name: value.astype(dtype, copy=False) for name, value in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    (folder / safetensors_file.INDEX).unlink(missing_ok=True)
    safetensors_file.write_file(folder / safetensors_file.SINGLE, tensors, {"format": "pt"})
    with replacing(folder / "config.json") as file:
        file.write((json.dumps(values, indent=1) + "\n").encode())
