"""What block sizes cost on this device: measured once, kept in the user's cache folder, for the adaptive policy.

Method: after a prompt of 128 tokens, each compiled draft alone, and for each number of verified rows a compiled
generation of 24 tokens and more; warm, taking turns (timing.interleaved: what counts is their ratio). A verify is what
is left of its round without the draft: accepting, committing and extending the draft's context are counted with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dflash_jax import decode
from dflash_jax.fetch import cache_folder
from dflash_jax.pair import Pair
from dflash_jax.policy import Adaptive, Fixed
from dflash_jax.state import Options
from dflash_jax.weights.atomic import replacing
from infer.machine import hardware, versions
from infer.timing import interleaved

_log = logging.getLogger(__name__)

_PROMPT, _TOKENS, _REPEATS = 128, 24, 5
Times = dict[str, list[float]]


def with_costs(pair: Pair, options: Options, batch: int) -> Options:
    """The options with the times of this device in their adaptive policy; others as they are. Models in pieces are
    no matter of speed: there the policy keeps its guess."""
    policy = options.policy
    if not isinstance(policy, Adaptive) or pair.models.in_pieces:
        return options
    if options.rollback == "replay":  # of the stepwise loop alone: its choices are those of a tape
        taped = with_costs(pair, dataclasses.replace(options, rollback="tape"), batch)
        return dataclasses.replace(taped, rollback="replay")
    path = cache_folder() / "costs" / f"{key(pair, policy, options, batch)}.json"
    times = _read(path, policy)
    if times is None:
        sizes = f"{len(policy.sizes)} block sizes and {len(policy.rows)} verify sizes"
        _log.warning(
            "measuring what %s cost on this device (once; compiles each, which takes minutes on a slow machine)",
            sizes,
        )
        times = measure(pair, policy, options, batch)
        _write(path, times)
    timed = dataclasses.replace(
        policy, draft_ms=tuple(times["draft_ms"]), verify_ms=tuple(times["verify_ms"])
    )
    return dataclasses.replace(options, policy=timed)


def measure(pair: Pair, policy: Adaptive, options: Options, batch: int) -> Times:
    """Milliseconds of a draft of each of `policy.sizes` and of a verify of each of `policy.rows`."""
    models, largest = pair.models, policy.sizes[-1]
    prompt = [1 + i % (pair.target.config.vocab_size - 1) for i in range(_PROMPT)]
    widest = dataclasses.replace(options, policy=Fixed(largest, policy.rows[-1]))
    state = decode.prefill(models, [prompt] * batch, widest, max_new_tokens=_TOKENS + largest)

    def fixed(size: int, rows: int) -> Options:
        return dataclasses.replace(options, policy=Fixed(size, rows))

    # every number of rows with the smallest block that fills it; a tree fills its rows from the largest
    drafted = [
        largest if options.tree and rows > 1 else next(n for n in policy.sizes if n >= rows)
        for rows in policy.rows
    ]
    slots = state.target_cache.slots
    nodes = {size: policy.rows[-1] if options.tree else size for size in policy.sizes}
    drafts = [
        partial(decode.propose_step, models, state, fixed(size, nodes[size]), size, slots)
        for size in policy.sizes
    ]
    loops = [
        partial(decode.generate, models, state, fixed(*shape))
        for shape in zip(drafted, policy.rows, strict=True)
    ]
    programs: list[Any] = [*drafts, *loops]
    ran = []
    for i, program in enumerate(programs, 1):
        _log.info("measuring block and verify sizes: compiling program %d of %d", i, len(programs))
        ran.append(jax.block_until_ready(program()))
    rounds = [int(state.rounds) for state in ran[len(drafts) :]]
    _log.info("measuring block and verify sizes: timing %d programs", len(programs))
    times = interleaved(programs, _REPEATS)
    draft_ms = {
        size: 1e3 * time if size > 1 else 0.0
        for size, time in zip(policy.sizes, times[: len(drafts)], strict=True)
    }
    verify_ms = [
        1e3 * time / count - draft_ms[size]
        for time, count, size in zip(times[len(drafts) :], rounds, drafted, strict=True)
    ]
    return {"draft_ms": list(draft_ms.values()), "verify_ms": [max(ms, 1e-3) for ms in verify_ms]}


def key(pair: Pair, policy: Adaptive, options: Options, batch: int) -> str:
    assert pair.draft is not None
    facts = {
        "method": [_PROMPT, _TOKENS],
        "hardware": hardware(pair.device),
        "dtype": pair.dtype,
        "target": pair.target.config.hash(),
        "draft": dataclasses.asdict(pair.draft.config),
        "draft_vocabulary": pair.draft_vocabulary,
        "sizes": [policy.sizes, policy.rows],
        "tree": options.tree and dataclasses.asdict(options.tree),
        "rollback": options.rollback,
        "batch": batch,
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _read(path: Path, policy: Adaptive) -> Times | None:
    """None when there is none, or not one that this program wrote."""
    try:
        times = json.loads(path.read_text())
        known = {name: [float(ms) for ms in times[name]] for name in ("draft_ms", "verify_ms")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    fits = len(known["draft_ms"]) == len(policy.sizes) and len(known["verify_ms"]) == len(policy.rows)
    return known if fits and min(known["verify_ms"]) > 0 else None


def _write(path: Path, times: Times) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(times).encode())
    except OSError:
        _log.info("the times are not kept: %s cannot be written", path)
