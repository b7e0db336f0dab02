"""A run of `fit` on a target of chance, small enough to be killed and repeated in tests; as a program too:

python tests/fitting.py FOLDER '{"steps": 6, "process_id": 0, ...}'
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tiny import TARGET, draft_config

from dflash_jax.drafts import DFlash
from dflash_jax.pair import Target
from dflash_jax.targets import abstract_params, make_target
from dflash_jax.testing import random_params
from dflash_jax.tokenizer import ByteTokenizer
from train import loop, mesh, settings
from train.conversations import Example
from train.corpus import Corpus, pack
from train.step import Setup

CONFIG = dataclasses.replace(TARGET, num_layers=2, layer_types=())
DRAFT = draft_config(num_layers=1, num_target_layers=2, taps=(0, 1))
TIMES = ("seconds", "compile_seconds", "draft_tokens_per_second")


def target(seed: int = 0) -> Target:
    params = random_params(abstract_params(CONFIG), gain=2.0, seed=seed)
    return Target(
        CONFIG, make_target(CONFIG), jax.tree.map(jax.numpy.asarray, params), ByteTokenizer(), "tiny"
    )


def conversations(count: int, seed: int) -> Corpus:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(12, 17, count)
    return pack(
        [Example(rng.integers(4, 64, n).astype(np.int32), np.arange(n) >= 4, "", 0.0) for n in lengths]
    )


def job(folder: Path, draft: Any = DRAFT, of: Target | None = None, **changes: Any) -> loop.Job:
    """changes: of Run, Optimizer, Mesh, or of Setup, by name."""
    parts = {
        "run": {"folder": folder, "steps": 6, "log_every": 2, "checkpoint_every": 2, "evaluate_every": 4},
        "optimizer": {"rate": 1e-2, "warmup": 0.2},
        "mesh": {"data": 1},
        "model": {"start": "target", "block_size": draft.block_size, "layers": draft.num_layers},
        "data": {"max_length": 16, "tokens": 64, "widths": (16,)},
    }
    setup: dict[str, Any] = {"anchors": 4, "gamma": 2.0, "chunk": 32}
    for name, value in changes.items():
        for section, values in parts.items():
            if name in settings.SECTIONS[section].__dataclass_fields__:
                values[name] = value
                break
        else:
            setup[name] = value
    made = {section: settings.SECTIONS[section](**values) for section, values in parts.items()}
    of = of or target()
    return loop.Job(
        settings.Settings(name="tiny", target="tiny", **made),
        Setup(of.module, DFlash(draft), **setup),
        of,
        conversations(20, 1),
        conversations(5, 2),
        {"files": ["made up"]},
    )


def fit(folder: Path, **changes: Any) -> loop.Outcome:
    made = job(folder, **changes)
    return loop.fit(made, mesh.make(made.settings.mesh))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run logged, without what a clock measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


# --- as a program ---------------------------------------------------------------------------------------


def start(folder: Path, devices: int = 1, **changes: Any) -> subprocess.Popen[str]:
    """kill_writing: step whose checkpoint is cut short by kill -9. All others: of `job`."""
    from conftest import CACHE

    return subprocess.Popen(
        [sys.executable, "-W", "error", __file__, str(folder), json.dumps(changes)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(CACHE)),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            # the same bits need the same compiler
            # the last one counts; the same bits need the same compiler flags
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _kill_writing(folder: Path, step: int) -> None:
    """kill -9 once orbax has a temporary folder of this step: in the middle of the write."""

    def watch() -> None:
        while True:
            names = os.listdir(folder / "checkpoints") if (folder / "checkpoints").exists() else []
            if any(name.startswith(f"{step}.") for name in names):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.0005)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path, kill_writing: int | None = None, **changes: Any) -> int:
    mesh.connect(
        settings.Mesh(**{k: v for k, v in changes.items() if k in settings.Mesh.__dataclass_fields__})
    )
    if kill_writing is not None:
        _kill_writing(folder, kill_writing)
    print("ready", flush=True)
    outcome = fit(folder, **changes)
    print(json.dumps({"step": outcome.step, "stopped": outcome.stopped}), flush=True)
    return 0 if outcome.stopped is None else 128 + outcome.stopped


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), **json.loads(sys.argv[2])))
