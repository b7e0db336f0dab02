"""GGUF drafts: read in four families, written in two (llama.cpp's and Luce's). What the metadata means is
said in draft_schema.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dflash_jax.config import (
    FULL,
    SLIDING,
    ConfigError,
    DraftConfig,
    Overrides,
    TargetConfig,
    Training,
    luce_taps,
)
from dflash_jax.weights import draft_schema, gguf_rope, gguf_writer
from dflash_jax.weights.draft_check import check_params, fusion_problems, refuse_others
from dflash_jax.weights.draft_schema import LUCE, UPSTREAM, Family, family_of
from dflash_jax.weights.fields import Fields, naming
from dflash_jax.weights.gguf_file import GGUFFile, read_file
from dflash_jax.weights.tensors import Tensor, Wanted, check, flatten, load, wanted

_log = logging.getLogger(__name__)

# llama.cpp's converter can put the target's into the file; a draft uses the target's anyway.
_TARGETS_OWN = ("token_embd.weight", "output.weight")
# What Luce's converter wrote before it read the model's own rope base.
_LUCE_BASE = 1e6


class NeedsTarget(ConfigError):
    """The file leaves facts to its target, and no target is named."""


def draft_config(
    path: str | Path, target: TargetConfig | None = None, overrides: Overrides | None = None
) -> DraftConfig:
    """The config of a GGUF draft of any family.

    target: supplies what the file leaves to it: depth, embedding rows, Luce's taps. A file that says them
    itself keeps its own: config.check_pair compares. overrides: what the file has wrong.

    Warns (UserWarning) where the file is known to be doubtful. ConfigError names everything that is missing
    or malformed; NeedsTarget when only a target is missing.
    """
    overrides = overrides or Overrides()
    file, family, values = _read(path, overrides.rope_theta)
    if overrides.rope_theta is None:
        _say_base(file, family, values, target)
    _complete(file, family, values, target)
    with naming(path):
        config = _build(file, family, values)
        if overrides.causal is None:
            _say_causal(file, family, config)
        return overrides.apply(config)


def shape_config(path: str | Path) -> DraftConfig:
    """A config with the file's shapes and the least target that they fit: what check_draft needs to look at a
    file alone. Without the warnings of draft_config."""
    file, family, values = _read(path)
    values.setdefault("taps", tuple(range(values.get("num_taps", 1))))
    values.setdefault("num_target_layers", max(values["taps"], default=0) + 1)
    values.setdefault("vocab_size", values["mask_token_id"] + 1)
    values.setdefault("block_size", family.block_size or 2)
    with naming(path):
        return _build(file, family, values)


def _read(path: str | Path, base: float | None = None) -> tuple[GGUFFile, Family, dict[str, Any]]:
    """What the file says, by field. base: of the rope, whatever the file says."""
    file = read_file(path)
    family = family_of(file)
    _refuse_others(file, family)
    values, problems = draft_schema.read(file, family)
    if base is not None:
        key = _key("rope.freq_base", family)
        problems = [problem for problem in problems if not problem.startswith(key)]
        said = values.get("rope.freq_base", "none")
        _log.warning("rope base %g from --rope-theta; %s has %s", base, path, said)
        values["rope.freq_base"] = base
    problems += _contradictions(file, family, values)
    if problems:
        raise ConfigError(f"{path}: " + "; ".join(problems))
    return file, family, values


def _key(field: str, family: Family) -> str:
    return next(key for row, key in draft_schema.keys(family) if row.field == field)


def _refuse_others(file: GGUFFile, family: Family) -> None:
    refuse_others(file.path, "tensor", file.tensors)
    own = (f"{family.architecture}.", "dflash.")
    # a flag of 0 says that the part is not there
    keys = [key for key, value in file.metadata.items() if key.startswith(own) and _says(value)]
    refuse_others(file.path, "metadata key", keys)


def _says(value: Any) -> bool:
    return len(value) > 0 if isinstance(value, (np.ndarray, list)) else bool(value)


def _contradictions(file: GGUFFile, family: Family, values: Mapping[str, Any]) -> list[str]:
    """Facts that are said twice must agree, and some need another."""
    problems = []
    said = {row.field for row, key in draft_schema.keys(family) if key in file.metadata}

    def agree(field: str, expected: Any, why: str) -> None:
        if field in values and values[field] != expected:
            problems.append(f"{_key(field, family)} is {values[field]}, {why} {expected}")

    size, taps = values.get("head_dim"), values.get("taps")
    if size is not None:
        agree("value_dim", size, "but keys have")
        agree("rope.dimension_count", size, "but all of a head rotates here:")
        agree("rope.dimension_sections", (size // 2, 0, 0, 0), "but only plain RoPE is supported:")
    if taps is not None:
        agree("num_taps", len(taps), "but the number of taps is")
        if "hidden_size" in values:
            agree("num_features", len(taps) * values["hidden_size"], f"but {len(taps)} taps give")
    if values.get("sliding_window") and "sliding" not in said:
        problems.append(f"{_key('sliding', family)} is missing: which layers have the window is not said")
    if any(values.get("sliding", ())) and not values.get("sliding_window", "sliding_window" in said):
        problems.append(f"{_key('sliding_window', family)} is missing or 0: the pattern has sliding layers")
    if not said & {"taps", "num_taps"}:
        problems.append(f"{_key('taps', family)} is missing")
    if "block_size" not in said and family.block_size is None:
        problems.append(f"{_key('block_size', family)} is missing")
    return problems


def _complete(file: GGUFFile, family: Family, values: dict[str, Any], target: TargetConfig | None) -> None:
    """Add what the target and the family supply."""
    table = file.tensors.get("token_embd.weight")
    if "vocab_size" not in values and table is not None:
        values["vocab_size"] = table.shape[0]
    missing = [
        what
        for field, what in (("num_target_layers", "depth"), ("vocab_size", "number of embedding rows"))
        if field not in values
    ]
    if target is None and missing:
        raise NeedsTarget(
            f"{file.path}: does not say its target's {' and '.join(missing)}: name the target with --target"
        )
    if target is not None:
        values.setdefault("num_target_layers", target.num_layers)
        values.setdefault("vocab_size", target.vocab_size)
    if "taps" not in values:
        values["taps"] = luce_taps(values["num_target_layers"], values["num_taps"])
        _warn(
            f"{file.path}: names no target layers: taking {list(values['taps'])}, Luce's rule for "
            f"{values['num_taps']} of {values['num_target_layers']}"
        )
    if "block_size" not in values and family.block_size is not None:
        values["block_size"] = family.block_size
        _warn(f"{file.path}: names no block size: taking {family.block_size}, as {family.writer} does")
    for name in _TARGETS_OWN:
        if name in file.tensors:
            _warn(f"{file.path}: {name} is not read: a draft uses its target's")


def _build(file: GGUFFile, family: Family, values: Mapping[str, Any]) -> DraftConfig:
    layers = values["num_layers"]
    types = draft_schema.layer_types(values.get("sliding"), layers)
    rope = {field: value for field, value in values.items() if field.startswith("rope.")}
    training = {
        field.removeprefix("training."): value
        for field, value in values.items()
        if field.startswith("training.")
    }
    same = (
        *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
        *("vocab_size", "block_size", "mask_token_id", "taps", "num_target_layers", "rms_norm_eps"),
    )
    most = values.get("max_positions", 0)
    return DraftConfig(
        **{field: values[field] for field in same},
        rope=gguf_rope.read(Fields(file.path, rope, family.architecture), most),
        # GGUF has no flag for biases: the tensors are there or not
        attention_bias=any(name.endswith(".bias") for name in file.tensors),
        layer_types=types,
        causal=(values["causal"],) * layers if "causal" in values else (),
        sliding_window=values["sliding_window"] if SLIDING in types else None,
        embedding_scale=values.get("embedding_scale", 1.0),
        logit_scale=values.get("logit_scale", 1.0),
        softcap=max(values.get("softcap", 0.0), 0.0),
        max_positions=most,
        training=Training(**training),
    )


# --- what is said of doubtful files ---------------------------------------------------------------------


def _say_base(file: GGUFFile, family: Family, values: Mapping[str, Any], target: TargetConfig | None) -> None:
    base = values["rope.freq_base"]
    _log.info("rope base %g from %s of %s", base, _key("rope.freq_base", family), file.path)
    # a file of ours names the depth too
    if family is not LUCE or base != _LUCE_BASE or "num_target_layers" in values:
        return
    if target is not None and target.rope.theta != base:
        _warn(
            f"{file.path}: has the rope base {base:g}, which Luce's converter writes whatever the model has; this "
            f"target's is {target.rope.theta:g}: if drafts are poor, correct it with --rope-theta"
        )


def _say_causal(file: GGUFFile, family: Family, config: DraftConfig) -> None:
    opened = [i for i, kind in enumerate(config.layer_types) if kind == SLIDING and not config.causal[i]]
    if opened:
        _warn(
            f"{file.path}: {_key('causal', family)} is false, so that sliding layers see both ways, as "
            "converters write for every draft: if drafts are poor, try --draft-causal sliding"
        )
    if FULL in config.layer_types and config.causal[config.layer_types.index(FULL)]:
        _log.info("all layers are causal: %s of %s", _key("causal", family), file.path)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


# --- tensors --------------------------------------------------------------------------------------------


def load_draft(
    path: str | Path, config: DraftConfig, abstract: Mapping[str, Any], dtype: DTypeLike
) -> dict[str, Any]:
    """Parameters of a draft, dequantised to numpy arrays in `dtype`, shaped as `abstract`
    (drafts.abstract_params).

    Raises one ConfigError that lists all missing, unknown and misshapen tensors.
    """
    file, found, expected = _tensors(path, abstract)
    return load(file.path, found, expected, dtype, _fusion(file, found, config))


def check_draft(path: str | Path, config: DraftConfig, abstract: Mapping[str, Any]) -> None:
    """The errors of load_draft, from the file's header alone."""
    file, found, expected = _tensors(path, abstract)
    check(file.path, found, expected, _fusion(file, found, config))


def _tensors(
    path: str | Path, abstract: Mapping[str, Any]
) -> tuple[GGUFFile, dict[str, Tensor], dict[str, Wanted]]:
    """What the file has, by its family's names, and what it must have."""
    file = read_file(path)
    family = family_of(file)
    refuse_others(path, "tensor", file.tensors)
    found: dict[str, Tensor] = {}
    for name, tensor in file.tensors.items():
        if name in _TARGETS_OWN:
            continue
        own = _own_name(name, family)
        if own in found:
            raise ConfigError(f"{path}: tensors {found[own].name} and {name} are both {own}")
        found[own] = tensor
    return file, found, wanted(abstract, family.names.to_file)


def _own_name(name: str, family: Family) -> str:
    """Luce's and community tools read each other's names, so files with either exist."""
    for other in draft_schema.FAMILIES:
        path = other.names.from_file(name)
        if path is not None:
            return family.names.to_file(path)
    return name


def _fusion(file: GGUFFile, found: Mapping[str, Tensor], config: DraftConfig) -> list[str]:
    return fusion_problems(found.get(family_of(file).names.to_file("fc.weight")), config)


def save_draft(
    path: str | Path,
    config: DraftConfig,
    params: Mapping[str, Any],
    kind: str,
    family: Family = UPSTREAM,
    vocabulary: Mapping[str, Any] | None = None,
) -> int:
    """Write a draft, matrices as `kind` (gguf_writer.KINDS), vectors in float32; returns the file's bytes.

    vocabulary: `tokenizer.*` metadata of the target, which llama.cpp wants in the file. ConfigError for what
    the family cannot say.
    """
    flat = flatten(params)
    check_params(path, config, flat)
    with naming(path):
        metadata = draft_schema.metadata(config, family)
    name = config.training.target_name
    general = {"general.type": "model", "general.name": f"DFlash draft{f' for {name}' if name else ''}"}
    tensors = {family.names.to_file(key): np.asarray(flat[key]) for key in sorted(flat, key=_order)}
    everything = general | dict(vocabulary or {}) | metadata
    return gguf_writer.write(Path(path), family.architecture, everything, tensors, kind)


def _order(path: str) -> tuple[int, Iterable[Any]]:
    """What is outside the layers first, then layer by layer."""
    head, _, rest = path.partition(".")
    return (1, (int(head.removeprefix("layers_")), rest)) if head.startswith("layers_") else (0, (0, path))
