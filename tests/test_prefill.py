"""Prefill and continuing: any chunks, any split of a conversation into calls give one state; no write
passes the end of a buffer; what cannot run is refused before any work."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import reference
from decoding import (
    BLOCKS,
    BUDGET,
    LENGTHS,
    PROMPTS,
    SEEDS,
    VOCAB,
    C,
    assert_caches_close,
    assert_same_run,
    assert_unchanged,
    autoregressive,
    pair,
    snapshot,
    warm,
)

from dflash_jax import decode
from dflash_jax.buckets import bucket, chunks_of, prefixes
from dflash_jax.config import ConfigError
from dflash_jax.generation import finish
from dflash_jax.policy import Fixed
from dflash_jax.sampling import sampling
from dflash_jax.state import Options, RoundState


def start(prompts: list[list[int]] = PROMPTS, **request: Any) -> RoundState:
    request.setdefault("max_new_tokens", BUDGET)
    request.setdefault("seeds", SEEDS)
    return decode.prefill(pair(), prompts, BLOCKS, **request)


def generate(state: RoundState) -> RoundState:
    return decode.generate(pair(), state, BLOCKS)


# --- chunks (case 16) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 7, max(LENGTHS) - 1, max(LENGTHS)])
def test_any_chunk_size_gives_the_same_state(chunk_size: int) -> None:
    """Target cache, draft cache and first token of rows that end in different chunks."""
    assert max(LENGTHS) == 15, "one chunk ends with the longest prompt, one before its last token"
    chunked = start(chunk_size=chunk_size)
    np.testing.assert_array_equal(chunked.target_cache.length, LENGTHS)
    np.testing.assert_array_equal(chunked.draft_cache.length, LENGTHS)
    assert_same_run(chunked, start())
    assert finish(generate(chunked)).tokens == autoregressive()


@pytest.mark.parametrize("chunk_size", [1, 7, max(LENGTHS)])
def test_layer_segmented_prefill_gives_the_same_state(chunk_size: int) -> None:
    assert_same_run(start(chunk_size=chunk_size, order="layers"), start())


def test_layer_segmented_prefill_continues_a_conversation() -> None:
    first = generate(start(max_new_tokens=12))
    second = start(MORE, max_new_tokens=20, state=first, seeds=None, order="layers", chunk_size=2)
    assert_same_run(second, start(MORE, max_new_tokens=20, state=first, seeds=None))


def test_a_prompt_in_a_batch_is_a_prompt_alone() -> None:
    """Padding of shorter rows is never committed nor seen."""
    together = start()
    for row in (2, 4):
        alone = start([PROMPTS[row]], seeds=[SEEDS[row]])
        mine = jax.tree.map(
            lambda x: x[row : row + 1] if x.shape[:1] == (8,) else x,  # noqa: B023
            together,
        )
        assert_same_run(alone, mine)


# --- continuing ---------------------------------------------------------------------------------------

MORE = [[(7 * i + j) % VOCAB for j in range(n)] for i, n in enumerate((4, 1, 6, 2, 3, 5, 1, 7))]


@pytest.mark.parametrize("sampled", [False, True])
def test_continuing_is_a_fresh_prefill_of_everything(sampled: bool) -> None:
    """Second turn on the caches of the first, against prompt + answer + second prompt in one."""
    how = warm() if sampled else sampling()
    first = generate(start(max_new_tokens=12, how=how))
    second = start(MORE, max_new_tokens=20, state=first, seeds=None)
    texts = [[*p, *out, *more] for p, out, more in zip(PROMPTS, finish(first).tokens, MORE, strict=True)]
    fresh = start(texts, max_new_tokens=20, how=how)
    assert [len(row) for row in finish(first).tokens] == [12] * 8
    assert_same_run(second, fresh)
    assert_same_run(generate(second), generate(fresh))


def test_a_state_continues_twice() -> None:
    """Two second turns on one first turn: neither sees the other, and the first stays what it is."""
    first = generate(start(max_new_tokens=12))
    before = snapshot(first)
    one = generate(start(MORE, max_new_tokens=20, state=first))
    other = generate(start(MORE[::-1], max_new_tokens=20, state=first))
    again = generate(start(MORE, max_new_tokens=20, state=first))
    assert_unchanged(first, before)
    assert_same_run(one, again)
    assert finish(one).tokens != finish(other).tokens


def test_continuing_keeps_what_is_not_given_again() -> None:
    """Seeds, sampling and stop tokens are those of the state unless new ones are given."""
    first = generate(start(max_new_tokens=3, how=warm(), stop_ids=(3, 4)))
    kept = start(MORE, max_new_tokens=4, state=first, seeds=None)
    assert_unchanged(kept.sampling, snapshot(warm()))
    np.testing.assert_array_equal(kept.seeds, SEEDS)
    np.testing.assert_array_equal(kept.stops, first.stops)
    given = start(MORE, max_new_tokens=4, state=first, seeds=[1] * 8, stop_ids=(7,), how=sampling())
    assert given.sampling.greedy
    np.testing.assert_array_equal(given.seeds, [1] * 8)
    np.testing.assert_array_equal(given.stops, [7, -1, -1, -1])


def test_continuing_grows_the_caches() -> None:
    """A second turn that passes the 64 positions of the first gets 128, with the first one's rows."""
    first = generate(start())
    texts = [[*p, *out, *more] for p, out, more in zip(PROMPTS, finish(first).tokens, MORE, strict=True)]
    second = start(MORE, state=first)
    assert [s.target_cache.layers[0].slots for s in (first, second)] == [64 + C, 128 + C]
    assert_same_run(second, start(texts))


def test_a_state_without_context_features_is_refused() -> None:
    alone = pair().without_draft()
    state = decode.prefill(alone, PROMPTS, BLOCKS, max_new_tokens=4)
    with pytest.raises(ConfigError, match="without a draft"):
        start(MORE, state=state)
    # The other way works: a target alone continues what a pair began.
    after = decode.prefill(alone, MORE, BLOCKS, max_new_tokens=4, state=generate(start(max_new_tokens=4)))
    assert after.draft_cache is None


# --- the end of the buffers (case 6) ------------------------------------------------------------------


def test_a_prompt_that_fills_the_capacity() -> None:
    """Prompt + budget = capacity = its bucket, and the budget fills its own: the last blocks reach into
    the spare slots and columns. A write that clamped would overwrite what is committed."""
    prompts = [[(3 * i + j * j) % VOCAB for j in range(64)] for i in range(8)]
    state = generate(start(prompts, max_new_tokens=64, capacity=128))
    assert (state.target_cache.slots, state.tokens.shape[1]) == (128 + C, 64 + C)
    texts = [[*p, *out] for p, out in zip(prompts, finish(state).tokens, strict=True)]
    assert [len(text) for text in texts] == [128] * 8
    assert_caches_close(state, start([text[:-1] for text in texts], max_new_tokens=1))
    for text in texts[:2]:
        logits, _ = reference.target(pair().target.config, pair().target_params, text[:-1])
        assert logits[63:].argmax(-1).tolist() == text[64:]


def test_a_wide_last_chunk_fits() -> None:
    """The last 1 of 61 tokens is a chunk of 16 rows: it is allocated, whatever the capacity says."""
    prompt = [(3 * j) % VOCAB for j in range(61)]
    state = start([prompt] * 8, max_new_tokens=1, capacity=62, chunk_size=60)
    assert state.target_cache.slots == 60 + 16
    assert_same_run(state, start([prompt] * 8, max_new_tokens=1))


def test_one_token_too_many_is_an_error_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_whole_chunk", None)
    prompts = [[1], [1] * 25]
    with pytest.raises(ConfigError, match="need 65 positions, but the capacity is 64"):
        decode.prefill(pair(), prompts, BLOCKS, max_new_tokens=40, capacity=64)


def test_long_contexts_read_longer_prefixes() -> None:
    """A cache of 1024 positions is read up to 256 until some row passes that: the output crosses it."""
    prompt = [(3 * j + j * j) % VOCAB for j in range(246)]
    models, options = pair(), Options(Fixed(C))
    state = decode.prefill(models, [prompt], options, max_new_tokens=24, capacity=1000)
    assert prefixes(state.target_cache.slots) == (256, 1024 + C)
    state = decode.generate(models, state, options)
    text = [*prompt, *finish(state).tokens[0]]
    assert len(text) == 270
    logits, _ = reference.target(models.target.config, models.target_params, text[:-1])
    assert logits[245:].argmax(-1).tolist() == text[246:]


# --- buckets and refusals -----------------------------------------------------------------------------


def test_buckets() -> None:
    assert [bucket(n) for n in (1, 64, 65, 128, 1000, 1024, 1025, 2048, 2049)] == [
        64, 64, 128, 128, 1024, 1024, 2048, 2048, 3072
    ]  # fmt: skip
    assert [prefixes(n) for n in (768, 769, 4104)] == [(768,), (256, 769), (256, 1024, 4104)]
    for slots in (1, 72, 256, 264, 265, 2000, 10_000):
        reads = prefixes(slots)
        assert list(reads) == sorted(set(reads)) and reads[-1] == slots


def test_the_last_chunk_is_hardly_wider_than_what_it_holds() -> None:
    widths = {n: chunks_of(np.zeros(1, int), np.array([n]), 512)[0][1] for n in range(1, 513)}
    assert all(n <= width <= max(16, 1.5 * n) for n, width in widths.items())
    assert sorted(set(widths.values())) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert [width for _, width, _ in chunks_of(np.zeros(1, int), np.array([70]), 32)] == [32, 32, 16]


@pytest.mark.parametrize(
    ("prompts", "request_", "message"),
    [
        ([], {}, "a prompt is empty"),
        ([[1], []], {}, "a prompt is empty"),
        ([[VOCAB]], {}, f"token id {VOCAB} is outside"),
        ([[1, -1]], {}, "token id -1 is outside"),
        ([[1]], {"chunk_size": 0}, "chunk_size is 0"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ([[1]], {"max_new_tokens": -3}, "max_new_tokens must be at least 1"),
        ([[1], [2]], {"seeds": [1]}, "1 seeds for 2 prompts"),
    ],
)
def test_refusals(prompts: list[list[int]], request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decode.prefill(pair(), prompts, BLOCKS, **{"max_new_tokens": 4, **request_})


def test_a_state_has_as_many_rows_as_prompts_follow() -> None:
    with pytest.raises(ConfigError, match="8 rows, but 1 prompts"):
        start([[1]], state=start(), seeds=None)
