"""Text in, text out: what the session adds to the decoder. Tiny models, see tests/folders.py."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import folders
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.block import tree_block
from dflash_jax.config import ConfigError
from dflash_jax.sampling import Acceptance
from dflash_jax.shortnames import Generation
from infer.session import Completion, Session
from infer.settings import Settings, plan
from infer.trace import Trace

PROMPT = "hello, you"
BUDGET = 16


def settings(**changes) -> Settings:
    return dataclasses.replace(Settings(max_new_tokens=BUDGET), **changes)


def test_speculative_text_is_the_autoregressive_text(session: Session, plain: Session) -> None:
    fast, slow = session.complete(PROMPT, settings()), plain.complete(PROMPT, settings())
    assert fast.tokens == slow.tokens and fast.text == slow.text
    assert (fast.mode, fast.block_size) == ("chain", folders.BLOCK)
    assert (slow.mode, slow.block_size) == ("ar", 1)
    assert len(fast.tokens) == BUDGET and fast.finish_reason == "length"


def test_a_draft_that_agrees_fills_blocks(fluent: Session) -> None:
    answer = fluent.complete(PROMPT, settings(max_new_tokens=1 + 4 * folders.BLOCK))
    assert answer.text == "a" * 17
    assert answer.stats.committed[0] == [4, 4, 4, 4]
    assert answer.stats.tau == 4.0


@pytest.mark.parametrize(
    "changes",
    [
        {"verify": "sequential"},
        {"bonus": "explicit"},
        {"policy": "adaptive"},
        {"tree_budget": 7},
        {"mode": "tree", "tree_chain_seed": True, "tree_temperature": 2.0},
        {"tree_budget": 3, "policy": "adaptive"},
        {"rollback": "states"},
        {"rollback": "replay"},
        {"prefill": "layers", "chunk_size": 5},
        {"block_size": 2},
        {"chunk_size": 5},
        {"logprobs": True},
    ],
    ids=str,
)
def test_every_mode_gives_the_same_tokens(session: Session, changes: dict) -> None:
    base = settings(temperature=0.9, seed=5)
    expected = session.complete(PROMPT, base).tokens
    assert session.complete(PROMPT, dataclasses.replace(base, **changes)).tokens == expected


def test_modes_are_named(session: Session) -> None:
    answer = session.complete(PROMPT, settings(tree_budget=7))
    assert (answer.mode, answer.block_size) == ("tree", folders.BLOCK)


def test_sampled_proposals_run(session: Session) -> None:
    answer = session.complete(PROMPT, settings(temperature=1.0, proposal="sample"))
    assert len(answer.tokens) == BUDGET


def test_seeds(session: Session) -> None:
    def tokens(seed: int) -> list[int]:
        return session.complete(PROMPT, settings(temperature=1.0, seed=seed)).tokens

    assert tokens(3) == tokens(3) != tokens(4)


def test_a_batch_gives_each_row_what_it_gets_alone(session: Session) -> None:
    prompts = [session.prompt(text) for text in ("hi", "a longer one, of more bytes", "?")]
    how = settings(temperature=0.8, seed=20)  # with 7 a draw lies 6e-7 from a boundary: a near-tie
    together = session.run(prompts, how).completions
    for row, prompt in enumerate(prompts):
        alone = session.run([prompt], dataclasses.replace(how, seed=20 + row)).completions[0]
        assert together[row].tokens == alone.tokens
        assert together[row].stats.committed == alone.stats.committed


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_small_budgets(session: Session, budget: int) -> None:
    answer = session.complete(PROMPT, settings(max_new_tokens=budget))
    assert len(answer.tokens) == budget and answer.finish_reason == "length"
    assert len(answer.stats.sizes) == max(0, budget - 1)
    if budget < 2:
        assert answer.tokens_per_second is None and math.isnan(answer.stats.tau)


# --- streaming and stop strings ---------------------------------------------------------------------------


def streamed(session: Session, how: Settings) -> tuple[Completion, list[str]]:
    pieces: list[str] = []
    answer = session.complete(PROMPT, how, on_text=lambda row, new: pieces.append(new))
    return answer, pieces


def test_streamed_pieces_are_the_text(session: Session) -> None:
    answer, pieces = streamed(session, settings(temperature=1.0, seed=2))
    whole = session.complete(PROMPT, settings(temperature=1.0, seed=2))
    assert "".join(pieces) == answer.text == whole.text
    assert len(pieces) > 3
    assert answer.tokens == whole.tokens


def test_a_stop_string_ends_inside_a_round(fluent: Session) -> None:
    """It is complete at token 7: the prefill's, a round of 4, and 2 of the next round."""
    answer, pieces = streamed(fluent, settings(stop=("aaaaaaa",)))
    assert answer.text == "" and pieces == []
    answer, pieces = streamed(fluent, settings(stop=("never", "b")))
    assert answer.text == "".join(pieces) == "a" * BUDGET
    answer = fluent.complete(PROMPT, settings(stop=("aaaaaaa",), logprobs=True))
    assert answer.tokens == [ord("a")] * 7 and answer.finish_reason == "stop"
    assert answer.stats.committed[0] == [4, 2]
    assert answer.logprobs is not None and len(answer.logprobs) == 7


def test_a_stop_string_cuts_what_the_full_text_has(session: Session) -> None:
    whole = session.complete(PROMPT, settings(temperature=1.0, seed=4))
    stop = whole.text[4:6]
    answer = session.complete(PROMPT, settings(temperature=1.0, seed=4, stop=(stop,)))
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert whole.tokens[: len(answer.tokens)] == answer.tokens


def test_stop_strings_end_rows_of_a_batch_one_by_one(session: Session) -> None:
    prompts = [session.prompt(text) for text in ("hi", "hello")]
    whole = session.run(prompts, settings(temperature=1.0)).completions
    stop = whole[0].text[3:5]
    assert stop not in whole[1].text
    cut = session.run(prompts, settings(temperature=1.0, stop=(stop,))).completions
    assert cut[0].text == whole[0].text[: whole[0].text.index(stop)]
    assert cut[0].finish_reason == "stop"
    assert cut[1].text == whole[1].text and cut[1].stats.committed == whole[1].stats.committed


def test_a_stop_token_ends_the_text(models: Path) -> None:
    from dflash_jax import pair

    told = folders.target(models / "stops", says=ord("a"), eos_token_id=[ord("a")])
    session = Session(pair.load(str(told), str(models / "draft")))
    answer = session.complete(PROMPT, settings())
    assert answer.finish_reason == "stop" and answer.tokens == [ord("a")]


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 5}, "top_p and top_k need a temperature above 0"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"seed": 2**31}, "seed is"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"block_size": 1}, "block_size is 1"),
        ({"stop": ("",)}, "stop string is empty"),
        ({"proposal": "sample"}, "needs a temperature above 0"),
        ({"tree_budget": 16, "proposal": "sample", "temperature": 0.7}, "'sample' is for chains"),
        ({"tree_budget": 16, "verify": "sequential"}, "cannot verify a tree"),
    ],
    ids=str,
)
def test_settings_that_nobody_can_use(changes: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 4},
        {"policy": "adaptive"},
        {"verify": "sequential"},
        {"bonus": "explicit"},
        {"proposal": "sample", "temperature": 1.0},
    ],
    ids=str,
)
def test_a_setting_of_the_draft_without_a_draft_is_refused(plain: Session, changes: dict) -> None:
    with pytest.raises(ConfigError, match="needs a draft"):
        plan(plain.pair, settings(**changes))


@pytest.mark.parametrize(
    ("of_pair", "changes", "says"),
    [
        ({"mode": "tree"}, {"proposal": "sample", "temperature": 0.7}, "'sample' is for chains"),
        ({"mode": "tree"}, {"verify": "sequential"}, "cannot verify a tree"),
        ({"policy": "adaptive"}, {"proposal": "sample", "temperature": 0.7}, "needs a fixed policy"),
    ],
    ids=str,
)
def test_what_does_not_go_with_the_pairs_own_settings(
    session: Session, of_pair: dict, changes: dict, says: str
) -> None:
    """Unless the request has its own."""
    asked = dataclasses.replace(session.pair, generation=Generation(**of_pair))
    with pytest.raises(ConfigError, match=says):
        plan(asked, settings(**changes))
    assert plan(asked, settings(mode="chain", policy="fixed", **changes)).mode == "chain"


def test_a_larger_block_than_trained_is_refused(session: Session) -> None:
    with pytest.raises(ConfigError, match="block size 5 cannot be used: the draft was trained with 4"):
        session.complete(PROMPT, settings(block_size=5))


def test_a_prompt_beyond_the_context_is_refused(session: Session) -> None:
    prompt = session.prompt("x" * (folders.CONTEXT - 50))
    fits = folders.CONTEXT - len(prompt)
    with pytest.raises(ConfigError, match=f"{len(prompt)} prompt tokens .* {fits + 1} make 513, .* is 512"):
        session.run([prompt], settings(max_new_tokens=fits + 1))


def test_prompts(session: Session, models: Path) -> None:
    from dflash_jax import pair

    chat = session.prompt("hi", system="be brief")
    assert session.pair.target.tokenizer.decode(chat, skip_special=False) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert session.prompt("hi", raw=True) == [ord("h"), ord("i")]
    with pytest.raises(ConfigError, match="the prompt is empty"):
        session.prompt("")
    with pytest.raises(ConfigError, match="leave --system or --raw out"):
        session.prompt("hi", system="be brief", raw=True)
    untemplated = Session(pair.load(str(models / "plain")))
    with pytest.raises(ConfigError, match="has no chat template: use --raw"):
        untemplated.prompt("hi")


# --- measurements -----------------------------------------------------------------------------------------


def test_log_probabilities_are_the_targets(session: Session, plain: Session) -> None:
    fast = session.complete(PROMPT, settings(logprobs=True)).logprobs
    slow = plain.complete(PROMPT, settings(logprobs=True)).logprobs
    assert fast is not None and len(fast) == BUDGET and all(value <= 0 for value in fast)
    np.testing.assert_allclose(fast, slow, atol=1e-4)


def test_compiling_is_told_apart(fluent: Session) -> None:
    how = settings(max_new_tokens=70)  # a program of its own: budgets up to 64 share one
    first = fluent.complete(PROMPT, how).seconds
    second = fluent.complete(PROMPT, how).seconds
    assert first["compile"] > 0.05
    assert second["compile"] < 0.2 * first["compile"]
    assert first["decode"] < 10 * second["decode"] + 0.5


def test_stepping_is_said(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        session.complete(PROMPT, settings(stop=("zzz",), verify="sequential", max_new_tokens=2))
    assert "from Python, for verify sequential, stop strings" in caplog.text


def test_trace_tells_every_round(fluent: Session, tmp_path: Path) -> None:
    trace = Trace(fluent.pair)
    answer = fluent.complete(PROMPT, settings(max_new_tokens=11), on_round=trace.on_round)
    trace.save(tmp_path / "trace.json", answer.prompt_tokens, answer.mode)
    seen = json.loads((tmp_path / "trace.json").read_text())
    assert [token["id"] for token in seen["prompt"]] == answer.prompt_tokens
    assert seen["first"] == {"id": ord("a"), "text": "a"}
    assert [r["kept"] for r in seen["rounds"]] == answer.stats.committed[0] == [4, 4, 2]
    first = seen["rounds"][0]
    assert first["round"] == 0 and first["size"] == 4 and first["path"] == [0, 1, 2, 3]
    assert [token["text"] for token in first["candidates"]] == ["a"] * 3
    assert [token["text"] for token in first["choices"]] == ["a"] * 4
    assert first["parents"] == [0, 1, 2]


def test_a_trace_of_a_tree_says_what_each_node_follows(session: Session) -> None:
    parents = np.array([[-1, 0, 0, 2, 0]], np.int32)
    block = tree_block(
        jnp.full((1, 5), ord("a"), jnp.int32), jnp.asarray(parents), jnp.asarray([[True] * 4 + [False]])
    )
    ids = np.full((1, 5), ord("a"))
    accepted = Acceptance(path=np.array([[0, 2, 3, 0, 0]]), count=np.array([3]), tokens=ids, choices=ids)
    trace = Trace(session.pair)
    before = SimpleNamespace(tokens=ids, anchor=ids[:, 0], rounds=0)
    seen = SimpleNamespace(block=block, acceptance=accepted, kept=np.array([3]))
    trace.on_round(before, SimpleNamespace(rounds=1), seen)
    [found] = trace._rounds
    assert (found["parents"], found["path"], found["size"]) == ([0, 0, 2], [0, 2, 3], 4)


def test_trace_marks_the_explicit_bonus(fluent: Session) -> None:
    trace = Trace(fluent.pair)
    fluent.complete(PROMPT, settings(max_new_tokens=11, bonus="explicit"), on_round=trace.on_round)
    assert [r["round"] for r in trace._rounds] == [0, None, 1, None]
