"""Where a round's time goes, and what the device could do.

Each stage of each arm's round is timed as a program of its own, all of them in turns (infer/timing.py), and set
against two ceilings that are measured on the same device in the same minute: bytes per second of a product of a large
matrix and a vector, floating-point operations per second of a product of two large matrices. Work counts weights
alone: a forward reads every matrix once, and costs two operations for each of its values and each row (of routed
experts: those that a row uses, at most all); caches, norms and attention over the context are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.pair import DTYPES, say_memory
from dflash_jax.state import Models
from dflash_jax.weights.tensors import flatten
from infer.bench.arms import ADAPTIVE, AR, Arm
from infer.bench.measure import Bench, Prompt
from infer.timing import interleaved, parts, seconds

_REPEATS = 9
_BYTES, _SIDE = 2**28, 1024  # of the two ceilings' matrices, at first
_LONG = 0.02  # seconds that are enough to be timed
_MOST = 2**32  # bytes of a matrix: a device that is still too fast for it is timed a little low


def measure(bench: Bench, asked: Sequence[Prompt], datasets: Mapping[str, Any]) -> dict[str, Any]:
    """The entries `ceiling` and `stages` of results.json, after the prompt of median length; and in every dataset
    `of_possible`, see `possible`."""
    prompt = sorted(asked, key=lambda prompt: len(prompt.tokens))[len(asked) // 2]
    arms = [arm for arm in bench.arms if arm.kind not in ADAPTIVE and not arm.is_peer]
    models = bench.pair.models
    runs = {
        (arm.name, name): run
        for arm in arms
        for name, run in parts(
            models if arm.kind != AR else models.without_draft(), prompt.tokens, arm.options
        ).items()
    }
    times = dict(zip(runs, interleaved(list(runs.values()), _REPEATS), strict=True))
    best, found = ceiling(bench.pair.device, DTYPES[bench.pair.dtype]), {}
    for arm in arms:
        alone = {f"{name}_ms": 1e3 * time for (of, name), time in times.items() if of == arm.name}
        found[arm.name] = alone | achieved(models, arm, alone, best)
    for dataset in datasets.values():
        for arm in arms[1:]:
            dataset["arms"][arm.name]["of_possible"] = possible(
                dataset["arms"][arm.name], found[arm.name], found[AR]
            )
    return {"ceiling": best, "stages": found, "prompt_tokens": len(prompt.tokens)}


def possible(of: Mapping[str, Any], stage: Mapping[str, float], ar: Mapping[str, float]) -> float | None:
    """Measured speed over autoregressive decoding, as a share of tau * t_ar / (t_draft + t_verify), each timed alone
    (t_ar: a whole autoregressive step)."""
    ratio, tau = of["ratio"]["median"], of["tau"]
    if ratio is None or tau is None:
        return None
    return float(ratio * (stage["draft_ms"] + stage["verify_ms"]) / (tau * ar["round_ms"]))


def ceiling(device: jax.Device, dtype: np.dtype) -> dict[str, float]:
    """bytes_per_second, flops_per_second."""
    side, reading = _timed(
        lambda matrix: matrix @ matrix[0], int((_BYTES / dtype.itemsize) ** 0.5), device, dtype
    )
    width, computing = _timed(lambda matrix: matrix @ matrix, _SIDE, device, dtype)
    return {
        "bytes_per_second": side * side * dtype.itemsize / reading,
        "flops_per_second": 2 * width**3 / computing,
    }


def _timed(
    product: Callable[[jax.Array], jax.Array], side: int, device: jax.Device, dtype: np.dtype
) -> tuple[int, float]:
    """Side of a square matrix, and seconds of its product: doubled while starting a product shows."""
    while True:
        say_memory("a matrix to time products with", side * side * dtype.itemsize, device)
        matrix = jax.device_put(jnp.ones((side, side), dtype), device)
        took, _ = seconds(partial(product, matrix), _REPEATS)
        if took >= _LONG or 4 * matrix.nbytes > _MOST:
            return side, took
        side *= 2


def achieved(
    models: Models, arm: Arm, times: Mapping[str, float], best: Mapping[str, float]
) -> dict[str, float]:
    """bytes_per_second and flops_per_second of draft and verify, and their shares of the ceilings."""
    work = {"verify": target_work(models, arm.options.nodes)}
    if arm.kind != AR:
        work["draft"] = draft_work(models, arm.block_size)
    found = {}
    for stage, amounts in work.items():
        for unit, amount in zip(("bytes", "flops"), amounts, strict=True):
            rate = amount / (1e-3 * times[f"{stage}_ms"])
            found[f"{stage}_{unit}_per_second"] = rate
            found[f"{stage}_{unit}_share"] = rate / best[f"{unit}_per_second"]
    return found


def target_work(models: Models, rows: int) -> tuple[float, float]:
    """Bytes and operations of one forward of the target over `rows` rows."""
    config, size, flops = models.target.config, 0.0, 0.0
    for name, leaf in flatten(models.target_params).items():
        if leaf.ndim < 2 or ("embed_tokens" in name and not config.tie_word_embeddings):
            continue
        used = flow = 1.0
        if config.moe is not None and ".experts." in name:
            flow = config.moe.per_token / config.moe.experts
            used = min(1.0, rows * flow)
        size, flops = size + used * leaf.nbytes, flops + 2 * rows * flow * leaf.size
    return size, flops


def draft_work(models: Models, block_size: int) -> tuple[float, float]:
    """Of one pass of the draft with the target's head. The fusion runs where the context is extended, in commit."""
    size = flops = 0.0
    for name, leaf in flatten(models.draft_params).items():
        if leaf.ndim >= 2 and not name.startswith("fc"):
            size, flops = size + leaf.nbytes, flops + 2 * block_size * leaf.size
    head = models.choices * models.target.config.hidden_size
    itemsize = jax.tree.leaves(models.target_params)[0].dtype.itemsize
    return size + itemsize * head, flops + 2 * (block_size - 1) * head
