"""Answers of the target to a batch of prompts, by the library's own decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dflash_jax import decode
from dflash_jax.generation import Generation, finish
from dflash_jax.policy import Fixed
from dflash_jax.sampling import Sampling
from dflash_jax.state import AUTOREGRESSIVE, Models, Options

# Chunks of a prompt: their widths are the powers of two up to this, so few programs are compiled.
_CHUNK = 256


def answer(
    models: Models,
    prompts: Sequence[Sequence[int]],
    *,
    rows: int,
    budget: int | Sequence[int],
    how: Sampling,
    seeds: Sequence[int],
    stop_ids: Sequence[int],
    capacity: int,
) -> Generation:
    """One answer of at most `budget` tokens to each prompt; speculative when `models` has a draft, with the
    same tokens (float32) for the same seeds.

    rows: the batch that is compiled; where prompts are fewer, rows of one token that end at once fill it.
    capacity: positions allocated for a prompt and its answer, the other half of the compiled shape.
    """
    count = len(prompts)
    limits = [budget] * count if isinstance(budget, int) else list(budget)
    spare = rows - count
    options = AUTOREGRESSIVE
    if models.draft is not None:
        options = Options(Fixed(models.draft.config.block_size))
    state = decode.prefill(
        models,
        [*prompts, *[prompts[0][:1]] * spare],
        options,
        max_new_tokens=[*limits, *[1] * spare],
        how=how,
        seeds=[*seeds, *[0] * spare],
        stop_ids=stop_ids,
        chunk_size=_CHUNK,
        capacity=capacity,
    )
    if models.draft is None:
        whole = finish(decode.generate_autoregressive(models, state))
    else:
        whole = finish(decode.generate(models, state, options))
    return dataclasses.replace(
        whole,
        tokens=whole.tokens[:count],
        finish_reasons=whole.finish_reasons[:count],
        committed=whole.committed[:count],
    )
