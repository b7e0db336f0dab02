"""The loops: budgets, stops, batches, forced acceptance, policies, and the debugging modes.

One pair, one batch and one set of programs for most of it (tests/decoding.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import (
    BLOCKS,
    BUDGET,
    LENGTHS,
    PROMPTS,
    SEEDS,
    VOCAB,
    C,
    assert_same_run,
    assert_unchanged,
    autoregressive,
    cut,
    pair,
    perfect,
    rounds_of,
    snapshot,
    warm,
)
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax import decode, stepwise
from dflash_jax.config import ConfigError
from dflash_jax.generation import DraftWarning, finish
from dflash_jax.policy import Adaptive, Fixed, Seen
from dflash_jax.sampling import sampling
from dflash_jax.state import Models, Options, RoundState, RoundTrace


def start(models: Models, options: Options = BLOCKS, **request: Any) -> RoundState:
    request.setdefault("max_new_tokens", BUDGET)
    return decode.prefill(models, PROMPTS, options, seeds=SEEDS, **request)


def stepped(models: Models, state: RoundState, options: Options = BLOCKS, **mode: Any):
    """All (state, trace) of the Python loop."""
    steps = list(stepwise.generate_stepwise(models, state, options, **mode))
    return steps, steps[-1][0]


# --- budgets and stops (cases 1-4, 8) -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["perfect", "random"])
def test_budgets(kind: str) -> None:
    """Rows with budgets 1, 2, C-1, C, C+1, ...: exactly that many tokens, the first of the output."""
    models = perfect() if kind == "perfect" else pair()
    budgets = [1, 2, C - 1, C, C + 1, 3, BUDGET, 2 * C + 1]
    generation = finish(decode.generate(models, start(models, max_new_tokens=budgets), BLOCKS))
    assert generation.tokens == [row[:n] for row, n in zip(autoregressive(), budgets, strict=True)]
    assert generation.finish_reasons == ["length"] * 8
    assert [sum(row) for row in generation.committed] == [n - 1 for n in budgets]
    if kind == "perfect":
        assert generation.committed == [rounds_of(n, C) for n in budgets]


def test_a_budget_of_one_needs_no_round() -> None:
    state = decode.generate(pair(), start(pair(), max_new_tokens=1), BLOCKS)
    assert int(state.rounds) == 0
    assert finish(state).tokens == [row[:1] for row in autoregressive()]


def test_a_budget_of_zero_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "prefill", None)
    generation = decode.complete(pair(), PROMPTS, BLOCKS, max_new_tokens=0)
    assert generation.tokens == [[]] * 8 == generation.committed
    assert generation.finish_reasons == ["length"] * 8


def test_the_mask_token_may_be_emitted() -> None:
    """Id 0 is the mask of this draft and a token of this output: nothing is dropped, in any position."""
    models = perfect()
    assert models.draft is not None and models.draft.config.mask_token_id == 0
    places = [i for row in autoregressive() for i, token in enumerate(row) if token == 0]
    assert len(places) > 10
    generation = finish(decode.generate(models, start(models), BLOCKS))
    assert generation.tokens == autoregressive()


@pytest.mark.parametrize("place", range(C + 2))
@pytest.mark.parametrize("kind", ["perfect", "random"])
def test_a_stop_token_ends_its_row(kind: str, place: int) -> None:
    """A stop token anywhere in an accepted block, also the prefill's token and the bonus: the row ends
    with it, counts only what was kept, and the other rows go on."""
    models = perfect() if kind == "perfect" else pair()
    rows = autoregressive()
    # A token that stands at `place` of some row for the first time.
    stop = next(row[place] for row in rows if row[place] not in row[:place])
    state = decode.generate(models, start(models, stop_ids=(stop,)), BLOCKS)
    generation = finish(state)
    expected = [cut(row, [stop]) for row in rows]
    assert any(len(row) == place + 1 for row in expected)
    assert len({len(row) for row in expected}) > 2, "rows end at different times"
    assert generation.tokens == expected
    assert generation.finish_reasons == ["stop" if stop in row else "length" for row in rows]
    if kind == "perfect":
        assert generation.committed == [rounds_of(len(row), C) for row in expected]
    np.testing.assert_array_equal(
        state.target_cache.length, [n + len(row) - 1 for n, row in zip(LENGTHS, expected, strict=True)]
    )
    kept = sum(n - 1 for row in generation.committed for n in row)
    assert sum(i * n for i, n in enumerate(generation.histogram())) == kept


def test_several_stop_tokens_and_the_earliest_wins() -> None:
    rows = autoregressive()
    stops = (rows[0][3], rows[1][5], rows[2][9], VOCAB + 5)
    generation = finish(decode.generate(perfect(), start(perfect(), stop_ids=stops), BLOCKS))
    assert generation.tokens == [cut(row, stops) for row in rows]


def test_a_stop_token_in_the_prompt_is_not_looked_at() -> None:
    stop = PROMPTS[4][2]
    generation = finish(decode.generate(pair(), start(pair(), stop_ids=(stop,)), BLOCKS))
    assert generation.tokens == [cut(row, [stop]) for row in autoregressive()]


def test_a_finished_row_stays_as_it_is() -> None:
    """Row 0 has a budget of 3: from then on its output, caches' lengths and anchor do not change."""
    models = perfect()
    steps, last = stepped(models, start(models, max_new_tokens=[3] + [BUDGET] * 7))
    frozen = None
    for state, trace in steps:
        if frozen is not None:
            assert int(trace.kept[0]) == 0
            now = snapshot((state.tokens[0, :3], state.target_cache.length[0], state.anchor[0]))
            assert all((a == b).all() for a, b in zip(frozen, now, strict=True))
        elif int(state.reason[0]):
            frozen = snapshot((state.tokens[0, :3], state.target_cache.length[0], state.anchor[0]))
    assert len(steps) > 3 and frozen is not None
    assert finish(last).tokens == [autoregressive()[0][:3], *autoregressive()[1:]]


# --- forced acceptance (case 7) -----------------------------------------------------------------------


@st.composite
def mistakes(draw: st.DrawFn) -> np.ndarray:
    """[8, BUDGET + C]: where the draft is wrong about the output, from never to nearly always."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.random((8, BUDGET + C)) < rng.random((8, 1)) * draw(st.sampled_from([0.3, 1.0]))


def placed(wrong: np.ndarray) -> np.ndarray:
    """The same by absolute position: row b's output starts after its prompt."""
    out = np.zeros((8, max(LENGTHS) + wrong.shape[1]), bool)
    for row, (line, n) in enumerate(zip(wrong, LENGTHS, strict=True)):
        out[row, n : n + len(line)] = line
    return out


@given(mistakes())
def test_any_acceptance_pattern(wrong: np.ndarray) -> None:
    """The output is the target's, every round keeps what the pattern says, and lengths never drift."""
    models = perfect(placed(wrong))
    state = decode.generate(models, start(models), BLOCKS)
    generation = finish(state)
    assert generation.tokens == autoregressive()
    assert generation.committed == [rounds_of(BUDGET, C, line) for line in wrong]
    np.testing.assert_array_equal(state.target_cache.length, [n + BUDGET - 1 for n in LENGTHS])
    np.testing.assert_array_equal(state.draft_cache.length, state.target_cache.length)


def test_lengths_and_anchors_after_every_round() -> None:
    """length = prompt + emitted - 1, and the anchor is the newest emitted token, in no cache yet."""
    rng = np.random.default_rng(0)
    wrong = rng.random((8, BUDGET + C)) < 0.25
    models = perfect(placed(wrong))
    before = start(models)
    steps, _ = stepped(models, before)
    for state, trace in steps:
        np.testing.assert_array_equal(
            state.target_cache.length, np.array(LENGTHS) + np.asarray(state.emitted) - 1
        )
        np.testing.assert_array_equal(state.draft_cache.length, state.target_cache.length)
        newest = np.asarray(state.tokens)[np.arange(8), np.asarray(state.emitted) - 1]
        np.testing.assert_array_equal(state.anchor, newest)
        np.testing.assert_array_equal(trace.block.tokens[:, 0], before.anchor)
        np.testing.assert_array_equal(trace.kept, state.emitted - before.emitted)
        np.testing.assert_array_equal(state.committed[:, int(before.rounds)], trace.kept)
        before = state


# --- one algorithm, several loops ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> RoundState:
    return decode.generate(pair(), start(pair()), BLOCKS)


def test_stepwise_is_the_compiled_loop(compiled: RoundState) -> None:
    steps, last = stepped(pair(), start(pair()))
    assert len(steps) == int(compiled.rounds)
    assert_same_run(last, compiled)
    assert finish(last) == finish(compiled)


def test_the_loops_can_be_mixed(compiled: RoundState) -> None:
    """Any state of the stepwise loop is a state that the compiled loop goes on from."""
    steps, _ = stepped(pair(), start(pair()))
    for i in (0, 5, len(steps) - 1):
        assert_same_run(decode.generate(pair(), steps[i][0], BLOCKS), compiled)


def test_sequential_verify_is_batched_verify(compiled: RoundState) -> None:
    _, last = stepped(pair(), start(pair()), verify="sequential")
    assert_same_run(last, compiled)


def test_explicit_bonus_adds_a_forward_and_no_round() -> None:
    models = perfect()
    implicit = decode.generate(models, start(models), BLOCKS)
    steps, last = stepped(models, start(models), bonus="explicit")
    assert finish(last).tokens == finish(implicit).tokens == autoregressive()
    # Rounds of C and bonuses of 1 take turns until the budget: 1 + 8 + 1 + 8 + 1 + ... = 40.
    kept = [int(trace.kept[0]) for _, trace in steps]
    assert kept == [8, 1, 8, 1, 8, 1, 8, 1, 3]
    assert finish(last).committed[0] == [8, 8, 8, 8, 3]
    assert int(last.rounds) == 5


def test_a_policy_on_the_host_sees_what_was_kept() -> None:
    """Any Python object with the four names: here one that alternates, and keeps a list."""

    class Alternate:
        sizes = (4, C)

        def __init__(self) -> None:
            self.seen: list[np.ndarray] = []

        def init(self) -> int:
            return 0

        def update(self, p: int, seen: Seen) -> int:
            self.seen.append(seen.committed)
            return p + 1

        def choose(self, p: int, confidence: object = None) -> int:
            return p % 2

    policy = Alternate()
    steps, last = stepped(perfect(), start(perfect()), policy=policy)
    assert finish(last).tokens == autoregressive()
    sizes = finish(last).sizes
    assert sizes == [(4, C)[i % 2] for i in range(len(steps))]
    assert finish(last).committed[0] == [4, C, 4, C, 4, C, 3]  # the last is what the budget left
    for (_, trace), seen in zip(steps, policy.seen, strict=True):
        np.testing.assert_array_equal(trace.kept, seen)


ADAPTIVE = Options(Adaptive((2, 4, C)))


def adaptive_run(accepted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Sizes and kept tokens when round i could keep accepted[i] candidates, by the policy alone."""
    policy, p = ADAPTIVE.policy, ADAPTIVE.policy.init()
    sizes: list[int] = []
    kept: list[int] = []
    for most in accepted:
        sizes.append(policy.sizes[int(policy.choose(p))])
        kept.append(min(sizes[-1], most + 1, BUDGET - 1 - sum(kept)))
        sure = jnp.full(1, sizes[-1], jnp.float32)  # a reciting draft always is
        size = jnp.asarray(sizes[-1])
        p = policy.update(p, Seen(jnp.asarray(kept[-1:], jnp.int32), size, size, sure))
        if sum(kept) == BUDGET - 1:
            return sizes, kept
    raise AssertionError("too few rounds")


@pytest.mark.parametrize("right", [True, False])
def test_adaptive_blocks_follow_the_draft(right: bool) -> None:
    """Compiled: blocks stay large while the draft is right and shrink when it is not; same output."""
    models = perfect(wrong=not right)
    state = decode.generate(models, start(models, ADAPTIVE), ADAPTIVE)
    if right:
        generation = finish(state)
    else:
        with pytest.warns(DraftWarning, match="no candidate was accepted in 312 rounds"):
            generation = finish(state)
    assert generation.tokens == autoregressive()
    sizes, kept = adaptive_run([C if right else 0] * BUDGET)
    assert generation.sizes == sizes
    assert generation.committed == [kept] * 8
    assert set(sizes) == ({C} if right else {2, 4, C})


def test_adaptive_on_the_host_is_adaptive_on_the_device() -> None:
    rng = np.random.default_rng(1)
    models = perfect(placed(rng.random((8, BUDGET + C)) < 0.8))
    state = decode.generate(models, start(models, ADAPTIVE), ADAPTIVE)
    _, last = stepped(models, start(models), policy=ADAPTIVE.policy)
    assert finish(last) == finish(state)
    assert finish(state).tokens == autoregressive()
    assert set(finish(state).sizes) == {2, 4, C}


def test_acceptance_by_position_and_histogram() -> None:
    """The draft is wrong about every fifth token: 5 kept per round, candidates 1 to 4 always accepted."""
    wrong = np.zeros((8, BUDGET + C), bool)
    wrong[:, 5::5] = True
    models = perfect(placed(wrong))
    generation = finish(decode.generate(models, start(models), BLOCKS))
    # 1 + 5 * 7 = 36, then 4 of the budget: the last round has no room for its fifth.
    assert generation.committed == [[5] * 7 + [4]] * 8
    assert generation.tau == pytest.approx(39 / 8)
    assert generation.acceptance_by_position() == pytest.approx([1, 1, 1, 7 / 8, 0, 0, 0])
    assert generation.histogram() == [0, 0, 0, 8, 56, 0, 0, 0]


# --- purity -------------------------------------------------------------------------------------------


def test_states_are_never_changed() -> None:
    """Every array of an old state is as it was, after every loop, and can be continued again."""
    state = start(pair())
    before = snapshot(state)
    first = decode.generate(pair(), state, BLOCKS)
    for leaf in jax.tree.leaves(state):
        assert not leaf.is_deleted()
    _, again = stepped(pair(), state)
    decode.generate_autoregressive(pair(), state)
    assert_unchanged(state, before)
    assert_same_run(first, again)
    assert_same_run(first, decode.generate(pair(), state, BLOCKS))


def test_no_trace_of_an_earlier_generation() -> None:
    """A long generation, then a short one: the second is what it is without the first."""
    long, short = [PROMPTS[4]], [PROMPTS[7]]
    alone = decode.complete(pair(), short, BLOCKS, max_new_tokens=BUDGET)
    first = decode.complete(pair(), long, BLOCKS, max_new_tokens=BUDGET)
    assert decode.complete(pair(), short, BLOCKS, max_new_tokens=BUDGET) == alone
    assert decode.complete(pair(), long, BLOCKS, max_new_tokens=BUDGET) == first
    assert [alone.tokens[0], first.tokens[0]] == [autoregressive()[7], autoregressive()[4]]


# --- compiled once, no host -----------------------------------------------------------------------------


def programs() -> list[int]:
    return [f._cache_size() for f in (decode.generate, decode._whole_chunk, decode._begin)]


@pytest.mark.parametrize("sampled", [False, True])
def test_nothing_compiles_again(sampled: bool) -> None:
    """Other prompts, lengths, budgets, seeds, stop tokens and temperatures of the same buckets run the
    programs that are there, and so does a draft or a target with other parameters."""

    def run(models: Models, prompts: list[list[int]], temperature: float, top_p: float, **request: Any):
        how = sampling(temperature, top_p, 8) if sampled else sampling()
        state = decode.prefill(models, prompts, BLOCKS, how=how, **request)
        return finish(decode.generate(models, state, BLOCKS))

    run(pair(), PROMPTS, 1.1, 0.9, max_new_tokens=BUDGET, seeds=SEEDS)
    there = programs()
    doubled = Models(
        jax.tree.map(lambda x: 2 * x, pair().target_params), pair().draft_params, pair().target, pair().draft
    )
    run(pair(), PROMPTS[::-1], 0.7, 0.5, max_new_tokens=BUDGET, seeds=[1] * 8, stop_ids=(3,))
    run(doubled, [[1, 2]] * 8, 2.0, 0.99, max_new_tokens=[5] * 7 + [33], stop_ids=(1, 2, 3, 4))
    assert programs() == there


def test_generation_stays_on_the_device() -> None:
    """No transfer and no callback in the loop: the host gives one program and waits."""
    state = jax.block_until_ready(start(pair()))
    models = jax.block_until_ready(pair())
    with jax.transfer_guard("disallow"):
        last = decode.generate(models, state, BLOCKS)
        with pytest.raises(Exception, match=r"[Dd]isallowed"):
            last.rounds + np.int32(1)  # the guard is on: the host's number would have to go there
    text = decode.generate.lower(models, state, BLOCKS).as_text()
    assert "while" in text and "callback" not in text


# --- refusals -----------------------------------------------------------------------------------------


def test_blocks_that_do_not_fit_are_refused() -> None:
    """Writes past the end of a buffer clamp silently: a state says how large its blocks may be."""
    small = Options(Fixed(4))
    with pytest.raises(ConfigError, match=f"block size {C} does not fit"):
        decode.generate(pair(), start(pair(), small), BLOCKS)
    with pytest.raises(ConfigError, match=f"block size {C + 1} cannot be used"):
        decode.generate(pair(), start(pair(), Options(Fixed(C + 1))), Options(Fixed(C + 1)))


def test_sampled_proposals_need_a_temperature() -> None:
    options = Options(Fixed(C), "sample")
    with pytest.raises(ConfigError, match="temperature"):
        decode.generate(pair(), start(pair(), options), options)


def test_traces_show_the_round() -> None:
    """Candidates, the target's choices after each, and what was kept of them, sampled."""
    state = start(pair(), how=warm())
    step: tuple[RoundState, RoundTrace] = next(iter(stepwise.generate_stepwise(pair(), state, BLOCKS)))
    _, trace = step
    tokens, choices = np.asarray(trace.block.tokens), np.asarray(trace.acceptance.choices)
    for row in range(8):
        agreed = 0
        while agreed < C - 1 and tokens[row, agreed + 1] == choices[row, agreed]:
            agreed += 1
        assert int(trace.kept[row]) == agreed + 1
