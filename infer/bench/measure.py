"""One prompt through every arm, from the same state.

The prompt is prefilled once; its state (caches of one size for all arms, the first token) is where every
arm starts, so that arms differ in decoding only, and each is one compiled program for the whole run. Arms
take turns within a prompt, each time with another one first, so that what slows the machine for a while
hits all of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import decode
from dflash_jax.generation import finish
from dflash_jax.pair import Pair
from dflash_jax.policy import Fixed
from dflash_jax.sampling import sampling
from dflash_jax.state import Options, RoundState
from infer.bench.arms import AR, Arm
from infer.clock import Clock
from infer.peers import Answer, Peers
from infer.settings import Settings


@dataclass(frozen=True)
class Prompt:
    """dataset, line: where it is from. tokens: as the target reads it."""

    dataset: str
    line: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Prompts:
    """Of one dataset: those that are measured, and how many were too long."""

    name: str
    prompts: list[Prompt]
    left_out: int


@dataclass(frozen=True)
class Record:
    """One arm's answer to one prompt.

    seconds: of decoding, compiled before, until its arrays are ready; cpu_seconds: what the process computed in
    them, all threads. prefill_seconds: of the prompt's one prefill, which all arms start from, with the draft's
    context where there is a draft.
    tokens: the output, of which the first is the prefill's. committed, sizes, nodes: of each round, the
    tokens kept, the most that could have been, and the rows that the target looked at.
    """

    dataset: str
    line: int
    arm: str
    repeat: int
    seconds: float
    cpu_seconds: float
    prefill_seconds: float
    tokens: list[int]
    finish_reason: str
    committed: list[int]
    sizes: list[int]
    nodes: list[int]


class Bench:
    """capacity: positions of the caches, prompt and budget of the longest prompt."""

    def __init__(self, pair: Pair, arms: Sequence[Arm], settings: Settings, capacity: int):
        self.pair, self.arms, self.settings, self.capacity = pair, tuple(arms), settings, capacity
        self.how = sampling(settings.temperature, settings.top_p, settings.top_k)
        self.largest = max(arm.options.largest for arm in arms)
        self._models = pair.models
        others = [arm.kind for arm in arms if arm.is_peer]
        self.peers = Peers(pair, list(dict.fromkeys(others))) if others else None

    def seed_of(self, prompt: Prompt) -> int:
        """Prompts are sampled with different draws, the arms on a prompt with the same."""
        return (self.settings.seed + prompt.line) % 2**31

    def request(self) -> dict[str, Any]:
        """What is asked of every arm, for the record."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "chunk_size")
        return {name: getattr(self.settings, name) for name in names} | {"capacity": self.capacity}

    def warm_up(self, prompt: Prompt) -> dict[str, float]:
        """Seconds that each arm took to compile; every program has run once after it."""
        compiling = {}
        state, seconds = self._prefill(prompt)
        compiling["prefill"] = seconds["compile"]
        limit = jnp.minimum(state.limit, 2 * self.largest + 1)
        for arm in self.arms:
            if arm.is_peer:
                self._ask(arm, prompt)
                continue
            clock = Clock()
            with clock.stage("decode"):
                jax.block_until_ready(self._decode(arm, dataclasses.replace(state, limit=limit)))
            compiling[arm.name] = clock.seconds["compile"]
        return compiling

    def measure(self, prompt: Prompt, turn: int, repeats: int) -> list[Record]:
        """turn: rotates the order of the arms."""
        state, seconds = self._prefill(prompt)
        records = []
        for repeat in range(repeats):
            first = (turn * repeats + repeat) % len(self.arms)
            for arm in self.arms[first:] + self.arms[:first]:
                if arm.is_peer:
                    records.append(self._of_peer(arm, prompt, repeat))
                    continue
                begin, computed = time.perf_counter(), time.process_time()
                end = jax.block_until_ready(self._decode(arm, state))
                took = time.perf_counter() - begin, time.process_time() - computed
                records.append(_record(prompt, arm, repeat, took, seconds["prefill"], end))
        return records

    def _prefill(self, prompt: Prompt) -> tuple[RoundState, dict[str, float]]:
        clock = Clock()
        with clock.stage("prefill"):
            state = decode.prefill(
                self._models, [prompt.tokens], Options(Fixed(self.largest)),
                max_new_tokens=self.settings.max_new_tokens, how=self.how, seeds=[self.seed_of(prompt)],
                stop_ids=self.pair.target.stop_ids, chunk_size=self.settings.chunk_size, capacity=self.capacity,
            )  # fmt: skip
            jax.block_until_ready(state)
        return state, clock.seconds

    def _ask(self, arm: Arm, prompt: Prompt) -> Answer:
        assert self.peers is not None
        return self.peers.answer(
            arm.kind, prompt.tokens, self.settings.max_new_tokens, self.pair.target.stop_ids, arm.block_size
        )

    def _of_peer(self, arm: Arm, prompt: Prompt, repeat: int) -> Record:
        answer, size = self._ask(arm, prompt), arm.block_size
        rounds, stopped = len(answer.committed), answer.tokens[-1] in self.pair.target.stop_ids
        return Record(
            prompt.dataset, prompt.line, arm.name, repeat, *answer.decoding, answer.prefill[0], answer.tokens,
            "stop" if stopped else "length", answer.committed, [size] * rounds, [size] * rounds,
        )  # fmt: skip

    def _decode(self, arm: Arm, state: RoundState) -> RoundState:
        if arm.kind == AR:
            return decode.generate_autoregressive(self._models, state)
        state = dataclasses.replace(state, policy=arm.options.policy.init())
        return decode.generate(self._models, state, arm.options)


def _record(
    prompt: Prompt, arm: Arm, repeat: int, seconds: tuple[float, float], prefill: float, end: RoundState
) -> Record:
    done = finish(end)
    rounds = len(done.sizes)
    return Record(
        prompt.dataset, prompt.line, arm.name, repeat, *seconds, prefill, done.tokens[0],
        done.finish_reasons[0], done.committed[0], done.sizes, np.asarray(end.nodes)[:rounds].tolist(),
    )  # fmt: skip
