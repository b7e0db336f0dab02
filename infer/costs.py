"""What block sizes cost on this device: measured once, kept in the user's cache folder, for the adaptive policy.

Method: from the state after a prompt of 128 tokens, each compiled draft and verify alone, warm, the median of 9;
what a round does besides (accept, commit, extend the draft's context) is the same for every size and
counted with each verify.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path

import jax.numpy as jnp

from dflash_jax import decode
from dflash_jax.block import chain_block, tree_block
from dflash_jax.fetch import cache_folder
from dflash_jax.pair import Pair
from dflash_jax.policy import Adaptive, Fixed
from dflash_jax.state import Options
from dflash_jax.weights.atomic import replacing
from infer.machine import describe_device, versions
from infer.timing import seconds

_log = logging.getLogger(__name__)

_PROMPT, _REPEATS = 128, 9
Times = dict[str, list[float]]


def with_costs(pair: Pair, options: Options, batch: int) -> Options:
    """The options with the times of this device in their adaptive policy; others as they are. Models in pieces are
    no matter of speed: there the policy keeps its guess."""
    policy = options.policy
    if not isinstance(policy, Adaptive) or pair.models.in_pieces:
        return options
    path = cache_folder() / "costs" / f"{_key(pair, policy, options, batch)}.json"
    times = _read(path, policy)
    if times is None:
        sizes = f"{len(policy.sizes)} block sizes and {len(policy.rows)} verify sizes"
        _log.warning("measuring what %s cost on this device (once; compiles each)", sizes)
        times = measure(pair, policy, options, batch)
        _write(path, times)
    timed = dataclasses.replace(
        policy, draft_ms=tuple(times["draft_ms"]), verify_ms=tuple(times["verify_ms"])
    )
    return dataclasses.replace(options, policy=timed)


def measure(pair: Pair, policy: Adaptive, options: Options, batch: int) -> Times:
    """Milliseconds of a draft of each of `policy.sizes` and of a verify of each of `policy.rows`."""
    models, largest = pair.models, policy.sizes[-1]
    fixed = dataclasses.replace(options, policy=Fixed(largest, policy.rows[-1]))
    prompt = [1 + i % (pair.target.config.vocab_size - 1) for i in range(_PROMPT)]
    state = decode.prefill(models, [prompt] * batch, fixed, max_new_tokens=64)
    slots = state.target_cache.slots

    def draft(size: int) -> float:
        rows = policy.rows[-1] if options.tree else size
        one = dataclasses.replace(options, policy=Fixed(size, rows))
        return 1e3 * seconds(lambda: decode.propose_step(models, state, one, size, slots), _REPEATS)[0]

    def verify(rows: int) -> float:
        tokens = jnp.ones((batch, rows), jnp.int32)
        parents = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32) - 1, tokens.shape)
        block = tree_block(tokens, parents) if options.tree else chain_block(tokens)
        return 1e3 * seconds(lambda: decode.verify_step(models, state, block, slots, fixed), _REPEATS)[0]

    drafted = decode.propose_step(models, state, fixed, largest, slots)
    output = decode.verify_step(models, state, drafted.candidates.block, slots, fixed)

    def rest() -> object:
        return decode.write_step(models, state, decode.judge_step(state, drafted, output, fixed), fixed)

    constant = 1e3 * seconds(rest, _REPEATS)[0]
    return {
        "draft_ms": [0.0 if size == 1 else draft(size) for size in policy.sizes],
        "verify_ms": [constant + verify(rows) for rows in policy.rows],
    }


def _key(pair: Pair, policy: Adaptive, options: Options, batch: int) -> str:
    assert pair.draft is not None
    facts = {
        "device": describe_device(pair.device),
        "cores": os.cpu_count(),
        "dtype": pair.dtype,
        "target": pair.target.config.hash(),
        "draft": dataclasses.asdict(pair.draft.config),
        "sizes": [policy.sizes, policy.rows],
        "tree": options.tree and dataclasses.asdict(options.tree),
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
