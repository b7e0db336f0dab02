"""What a request answers: one completion per row, cut out of the batch's generation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dflash_jax.generation import Generation
from dflash_jax.state import RoundState


@dataclass(frozen=True)
class Completion:
    """One row's answer.

    tokens: a stop token included, what follows a stop string not. finish_reason: "stop" or "length".
    stats: a Generation of this row alone. seconds: of the whole request, see clock.STAGES.
    """

    text: str
    tokens: list[int]
    prompt_tokens: list[int]
    finish_reason: str
    stats: Generation
    logprobs: list[float] | None
    mode: str
    block_size: int
    seconds: dict[str, float]

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding: the first token is the prefill's. None when nothing was decoded."""
        decoded = len(self.tokens) - 1
        return decoded / self.seconds["decode"] if decoded > 0 and self.seconds["decode"] > 0 else None


@dataclass(frozen=True)
class Run:
    """completions: one per prompt. state: where they ended, to be continued by `Session.run(after=...)`;
    None when nothing ran. It may lag behind the tokens (see `covered`)."""

    completions: list[Completion]
    state: RoundState | None

    @property
    def covered(self) -> list[int]:
        """Tokens of each row's conversation that the state holds, its anchor included."""
        return [] if self.state is None else (np.asarray(self.state.target_cache.length) + 1).tolist()


def row_of(whole: Generation, b: int) -> Generation:
    """Row b as a generation of its own; its rounds are the first of the batch's."""
    committed = whole.committed[b]
    return Generation(
        [whole.tokens[b]],
        [whole.finish_reasons[b]],
        [committed],
        whole.sizes[: len(committed)],
        [whole.logprobs[b]] if whole.logprobs else None,
    )


def cut_at(one: Generation, kept: int) -> Generation:
    """What a stop string leaves: the first `kept` tokens. Those beyond were the end of the last round
    and do not count as committed."""
    beyond = len(one.tokens[0]) - kept
    committed = list(one.committed[0])
    if committed:
        committed[-1] -= beyond
    return dataclasses.replace(
        one,
        tokens=[one.tokens[0][:kept]],
        finish_reasons=["stop"],
        committed=[committed],
        logprobs=[one.logprobs[0][:kept]] if one.logprobs else None,
    )
