"""A trained draft: the export of a run, any draft's folder, or a checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax import drafts, pair, sources
from dflash_jax.config import ConfigError, DraftConfig, check_pair
from train import build, checkpoints, features
from train.settings import Settings

DRAFT, CHECKPOINTS = Path("draft"), Path("checkpoints")  # in the run's folder


@dataclass(frozen=True, eq=False)
class Trained:
    """params: float32, on the host. evaluation: what the checkpoint says of it."""

    name: str
    config: DraftConfig
    params: Any
    evaluation: dict[str, Any] = field(default_factory=dict)


def load(settings: Settings, target: pair.Target, name: str | None) -> Trained:
    """name: a checkpoint's folder, a draft's folder or .gguf file, a hub id or a short name; None is what the run
    exported. ConfigError when it belongs to another target."""
    if name is None:
        folder = settings.within(DRAFT)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder}: no draft there: run `python -m train fit`, or name one with --draft"
            )
        name = str(folder)
    if is_checkpoint(Path(name)):
        return load_checkpoint(settings, target, Path(name))
    source = sources.find_draft(name)
    config = pair.draft_config(source, target.config)
    check_pair(target.config, config)
    return Trained(source.name, config, pair.draft_params(source, config, np.dtype(np.float32)))


def is_checkpoint(path: Path) -> bool:
    return (path / checkpoints.PARAMS).is_dir()


def load_checkpoint(settings: Settings, target: pair.Target, path: Path) -> Trained:
    """ConfigError that names the setting where the settings are not those that it was made with."""
    saved = checkpoints.about(path)
    config = build.draft_config(settings, target)
    shape = dataclasses.asdict(config)
    shape["layers"] = shape.pop("num_layers")  # as loop.contract names it
    checkpoints.check(saved, {**saved.contract, **shape, "target": features.target_digest(target)}, path)
    params = checkpoints.read_params(path, drafts.abstract_params(config))
    return Trained(str(path), config, params, {"step": saved.step, **(saved.evaluation or {})})


def best(settings: Settings) -> Path:
    """The run's best checkpoint by the walk. ConfigError when there is none."""
    folder = settings.within(CHECKPOINTS)
    if folder.is_dir():
        with checkpoints.Checkpoints(folder, settings.run.keep) as found:
            if found.best is not None:
                return found.path(found.best)
    raise ConfigError(f"{folder}: no checkpoint there: run `python -m train fit`, or name one with --draft")
