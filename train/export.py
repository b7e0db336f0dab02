"""A draft as a folder that others read: nested Hugging Face schema in bfloat16, with a model card.

z-lab's code, vLLM and SGLang read this schema (checked against PyPI `dflash` in tests/parity).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_jax import pair
from dflash_jax.config import ConfigError, DraftConfig, Training
from dflash_jax.terminal import Screen
from dflash_jax.weights import hf
from dflash_jax.weights.atomic import replacing
from train import build, card, corpus, trained
from train.loss import default_gamma
from train.settings import Settings


def write_draft(
    folder: Path,
    config: DraftConfig,
    params: Mapping[str, Any],
    settings: Settings,
    evaluation: Mapping[str, Any],
    data: Mapping[str, Any],
    target: pair.Target,
) -> None:
    """config.json, model.safetensors and README.md; other files of the folder stay.

    evaluation: what evaluate.held_out measured (and `decoder`, what evaluate.measure did). data: the report
    of corpus.load. Both may be empty: the card then says so. target: named in the config, with its hash.
    """
    config = dataclasses.replace(config, training=_training(config, settings, target))
    hf.save_draft(folder, config, params, np.dtype(ml_dtypes.bfloat16))
    with replacing(folder / "README.md") as file:
        file.write(card.text(config, settings, evaluation, data, folder.name).encode())


def _training(config: DraftConfig, settings: Settings, target: pair.Target) -> Training:
    o = settings.objective
    gamma = default_gamma(config.block_size) if o.gamma is None else o.gamma
    return Training(
        loss_decay=gamma if o.loss == "decay" and math.isfinite(gamma) else None,
        num_anchors=o.anchors,
        target_name=_name(target.source),
        target_hash=target.config.hash(),
    )


def _name(source: str) -> str:
    """Of a folder or a file its own name: where it lies is nobody's business."""
    return Path(source).name if Path(source).exists() else source


def _check_place(folder: Path) -> None:
    """Nothing is overwritten but a model's folder."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file: a draft is a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: holds other files and no model: name another place")
    if any(parent.is_file() for parent in folder.parents):
        raise ConfigError(f"{folder}: lies below a file: name another place")


def run(settings: Settings, screen: Screen, draft: str | None, out: Path | None) -> int:
    """A checkpoint of the run as a folder: the best one by default, in the place where `fit` puts its own."""
    if out is not None:
        _check_place(out)
    target = build.load_target(settings)
    path = trained.best(settings) if draft is None else Path(draft)
    if not trained.is_checkpoint(path):
        raise ConfigError(f"{path}: no checkpoint: export writes a checkpoint of `fit` as a draft's folder")
    found = trained.load_checkpoint(settings, target, path)
    _, _, report = corpus.load(settings, target.tokenizer)
    folder = out or settings.within(Path(trained.DRAFT))
    write_draft(folder, found.config, found.params, settings, found.evaluation, report, target)
    screen.clear()
    print(f"{folder}: {found.name} as a draft in bfloat16, with its model card")
    print(f"next: python -m infer generate --target {target.source} --draft {folder} --prompt '...'")
    return 0
