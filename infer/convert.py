"""`convert`: the same weights in another kind of file."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_jax import pair
from dflash_jax.config import ConfigError, DraftConfig, Overrides, check_pair
from dflash_jax.sources import Source, find_target
from dflash_jax.terminal import Screen
from dflash_jax.weights import draft_gguf, gguf_export, gguf_writer, hf, safetensors_file
from dflash_jax.weights.draft_schema import LUCE, UPSTREAM
from dflash_jax.weights.gguf_file import read_file
from infer.inspect import is_draft, size_of
from infer.options import Convert

_log = logging.getLogger(__name__)

_FAMILIES = {"gguf": UPSTREAM, "gguf-luce": LUCE}
_HF_TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def run(flags: Convert, screen: Screen) -> int:
    """Raises ConfigError before anything is written. A model of the same kind at DST is replaced."""
    overrides = Overrides(flags.rope_theta, flags.draft_causal)
    source = find_target(flags.src).target
    _check_place(source, flags.dst, flags.format)
    kinds = _kinds(source)
    kind = flags.type or _default(kinds, flags.format)
    if flags.format == "hf" and kind not in _HF_TYPES:
        raise ConfigError(f"--type {kind} is one of GGUF: a Hugging Face folder holds {', '.join(_HF_TYPES)}")
    draft = is_draft(source)
    _check_replaced(flags.dst, draft)
    if draft:
        what, notes = _draft(source, flags, kind, _exact(kinds), overrides)
    else:
        if flags.target is not None or overrides != Overrides():
            raise ConfigError(
                f"{source.name} is a target: --target, --rope-theta and --draft-causal are of drafts"
            )
        what, notes = _target(source, flags, kind, _exact(kinds))
    screen.clear()
    print(f"{flags.dst}: {what}, {kind}, {_bytes(flags.dst)} (from {source.name}, {_bytes(source.path)})")
    for note in notes:
        print(f"note: {note}")
    return 0


def _check_place(source: Source, place: Path, form: str) -> None:
    if place.exists() and place.resolve() == source.path.resolve():
        raise ConfigError(f"{place}: is the source: name another place")
    if form == "hf" and place.exists() and not place.is_dir():
        raise ConfigError(f"{place}: is a file: a Hugging Face model is a folder")
    if any(parent.is_file() for parent in place.parents):
        raise ConfigError(f"{place}: lies below a file: name another place")
    if form != "hf" and place.is_dir():
        raise ConfigError(f"{place}: is a folder: a GGUF model is one file, {place}/draft.gguf for one")
    if form == "hf" and place.suffix == ".gguf":
        raise ConfigError(f"{place}: --format hf makes a folder: leave .gguf out, or use --format gguf")


def _check_replaced(place: Path, draft: bool) -> None:
    """Nothing is overwritten but a model of the same role."""
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    try:
        same = is_draft(Source(str(place), place)) == draft
    except ConfigError:
        same = False
    if not same:
        role = "draft" if draft else "target"
        raise ConfigError(f"{place}: exists, and is no {role} that could be replaced: name another place")


def _kinds(source: Source) -> Counter[str]:
    """How many tensors of each type a model has, matrices apart: they alone have a choice."""
    path = source.with_weights()
    tensors = read_file(path).tensors if source.is_gguf else safetensors_file.read_folder(path)
    return Counter(("" if len(tensor.shape) > 1 else "vector ") + tensor.kind for tensor in tensors.values())


def _default(kinds: Counter[str], form: str) -> str:
    """The source's own type where the format has it, else BF16, which all readers take."""
    matrices = [kind for kind, _ in kinds.most_common() if not kind.startswith("vector")]
    known = _HF_TYPES if form == "hf" else gguf_writer.KINDS
    return matrices[0] if matrices and matrices[0] in known else "BF16"


def _exact(kinds: Counter[str]) -> np.dtype:
    """A dtype that holds all values of the source (but of float64)."""
    return _HF_TYPES["BF16" if {kind.removeprefix("vector ") for kind in kinds} == {"BF16"} else "F32"]


def _draft(
    source: Source, flags: Convert, kind: str, dtype: np.dtype, overrides: Overrides
) -> tuple[str, list[str]]:
    host = find_target(flags.target).target if flags.target is not None else None
    of_host = pair.target_config(host) if host is not None else None
    config = pair.draft_config(source, of_host, overrides)
    if of_host is not None:
        check_pair(of_host, config)
        config = _trained_for(config, str(flags.target), of_host.hash())
    _log.info("reading %s", source.name)
    params = pair.draft_params(source, config, dtype)
    _log.info("writing %s", flags.dst)
    if flags.format == "hf":
        hf.save_draft(flags.dst, config, params, _HF_TYPES[kind])
        return "a draft (Hugging Face folder)", []
    family = _FAMILIES[flags.format]
    words = _tokenizer(host, source) if family is UPSTREAM else {}
    draft_gguf.save_draft(flags.dst, config, params, kind, family, words)
    notes = []
    if family is UPSTREAM and not words:
        notes = ["the file has no tokenizer, which llama.cpp wants: --target FILE.gguf copies the target's"]
    return f"a draft (GGUF, {family.name})", notes


def _tokenizer(*models: Source | None) -> dict[str, Any]:
    """Of the first that has one as GGUF has it."""
    for model in models:
        if model is not None and model.is_gguf:
            words = gguf_export.vocabulary(model.path)
            if "tokenizer.ggml.tokens" in words:
                return words
    return {}


def _trained_for(config: DraftConfig, name: str, digest: str) -> DraftConfig:
    """The target that the user names, where the draft's file names none."""
    known = config.training
    training = dataclasses.replace(
        known, target_name=known.target_name or name, target_hash=known.target_hash or digest
    )
    return dataclasses.replace(config, training=training)


def _target(source: Source, flags: Convert, kind: str, dtype: np.dtype) -> tuple[str, list[str]]:
    if flags.format == "gguf-luce":
        raise ConfigError(f"{source.name} is a target: --format gguf-luce is of drafts, use gguf")
    config = pair.target_config(source)
    _log.info("reading %s", source.name)
    params = pair.target_params(source, config, dtype)
    _log.info("writing %s", flags.dst)
    if flags.format == "hf":
        hf.save_target(flags.dst, config, params, _HF_TYPES[kind])
        return "a target (Hugging Face folder)", [
            "the tokenizer's files are not written: copy the model's own"
        ]
    words = _tokenizer(source)
    gguf_export.save_target(flags.dst, config, params, kind, words)
    notes = [] if words else ["the file has no tokenizer: a folder's is not converted"]
    return f"a target (GGUF, {config.family})", notes


def _bytes(path: Path) -> str:
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("config.json")]
    return size_of(sum(file.stat().st_size for file in files))
