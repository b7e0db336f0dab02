"""What a run leaves to read: metrics.jsonl, a line per logged step, and TensorBoard events if wanted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax import plain_json
from dflash_jax.config import ConfigError
from dflash_jax.weights.atomic import replacing
from train.settings import Settings

FILE = "metrics.jsonl"
TRAIN, EVALUATION = "train", "evaluation"


class Records:
    """Appends to the run's metrics.jsonl; of several processes only the primary one does. step: where the
    run stands; later lines are of a run that was killed, and will be written again. A context manager."""

    def __init__(self, settings: Settings, step: int, primary: bool = True):
        self._file = self._events = None
        if not primary:
            return
        path = settings.folder / FILE
        kept = [line for line in read(path) if line["step"] <= step]
        if settings.run.tensorboard:
            self._events = _writer(settings.folder / "tensorboard", step)
        with replacing(path) as file:
            file.writelines(json.dumps(line).encode() + b"\n" for line in kept)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: Any) -> None:
        for open_one in (self._file, self._events):
            if open_one is not None:
                open_one.close()

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """values: numbers, or lists of them (one per slot)."""
        if self._file is not None:
            self._file.write(plain_json.text({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                slots = isinstance(value, list)
                for slot, number in enumerate(value if slots else [value], 1):
                    self._events.add_scalar(
                        f"{kind}/{name}/{slot}" if slots else f"{kind}/{name}", number, step
                    )


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, [] when there is none. A last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").splitlines()
    whole = []
    for number, line in enumerate(lines, 1):
        try:
            whole.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ConfigError(f"{path}: line {number} is not JSON: remove it") from None
    return whole


def _writer(folder: Path, step: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ConfigError(
            "run.tensorboard needs the package tensorboardX: pip install 'dflash-jax[train]'"
        ) from None
    return SummaryWriter(str(folder), purge_step=step + 1)
