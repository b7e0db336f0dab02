"""What is measured on what: equal for two runs whose measurements may stand in one table."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.pair import Pair
from infer.bench.measure import Bench, Prompts
from infer.machine import describe_device, versions

_VALUES = 1024  # of each tensor


def about(bench: Bench, datasets: Sequence[Prompts], repeats: int) -> dict[str, Any]:
    pair = bench.pair
    return {
        "target": {"source": pair.target.source, "weights": fingerprint(pair.target.params)},
        "draft": pair.draft and {"source": pair.draft.source, "weights": fingerprint(pair.draft.params)},
        "dtype": pair.dtype,
        "hardware": hardware(pair),
        "versions": versions(),
        "settings": {**bench.request(), "repeats": repeats},
        "arms": {arm.name: repr(arm.options) for arm in bench.arms},
        "prompts": {dataset.name: _digest(repr([p.tokens for p in dataset.prompts])) for dataset in datasets},
    }


def hardware(pair: Pair) -> dict[str, Any]:
    return {
        "device": describe_device(pair.device),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
    }


def _processor() -> str:
    """The CPU's name; Linux keeps it in a file, elsewhere Python may know."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def fingerprint(params: Any) -> str:
    """sha256 over every tensor's name, shape, type and first values: tells a draft from a later one, in
    milliseconds at any size. It is no checksum of the file."""
    parts = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        first = np.asarray(leaf.reshape(-1)[:_VALUES])
        parts.append(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {first.tobytes().hex()}")
    return _digest("\n".join(parts))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
