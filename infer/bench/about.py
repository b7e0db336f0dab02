"""What is measured on what: equal for two runs whose measurements may stand in one table."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.policy import Adaptive
from dflash_jax.state import Options
from infer.bench.measure import Bench, Prompts
from infer.machine import hardware, versions

_VALUES = 1024  # of each tensor


def about(bench: Bench, datasets: Sequence[Prompts], repeats: int) -> dict[str, Any]:
    pair = bench.pair
    return {
        "target": {"source": pair.target.source, "weights": fingerprint(pair.target.params)},
        "draft": pair.draft and {"source": pair.draft.source, "weights": fingerprint(pair.draft.params)},
        "draft_vocabulary": pair.draft_vocabulary,
        "dtype": pair.dtype,
        "hardware": hardware(pair.device),
        "settings": {**bench.request(), "repeats": repeats},
        "arms": {arm.name: repr(_timeless(arm.options)) for arm in bench.arms},
        "versions": versions() | (bench.peers.versions() if bench.peers else {}),
        "prompts": {dataset.name: _digest(repr([p.tokens for p in dataset.prompts])) for dataset in datasets},
    }


def _timeless(options: Options) -> Options:
    """Without the times that an adaptive policy was given: measured again, they differ a little."""
    if not isinstance(options.policy, Adaptive):
        return options
    policy = dataclasses.replace(options.policy, draft_ms=(), verify_ms=())
    return dataclasses.replace(options, policy=policy)


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
