"""`check`, what it rests on, and `time`: at tiny sizes, through the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax import decode, plain_json, testing
from dflash_jax.config import ConfigError
from dflash_jax.policy import Fixed
from dflash_jax.sampling import choose, sampling
from dflash_jax.state import Options
from infer import check, lossless
from infer.__main__ import main
from infer.datasets import read_prompts
from infer.session import Session


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"turns": ["count to ten", "again"]}, {"prompt": "say a word"}, {"turns": ["why?"]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_prompts_are_first_turns_spread_over_the_file(prompts: Path) -> None:
    assert read_prompts(prompts) == ["count to ten", "say a word", "why?"]
    assert read_prompts(prompts, 1) == ["count to ten"]
    assert read_prompts(prompts, 9) == read_prompts(prompts)


def test_conversations_are_prompts_too(tmp_path: Path) -> None:
    """As `train regenerate` writes them."""
    path = tmp_path / "conversations.jsonl"
    roles = [("system", "Be kind."), ("user", "hello"), ("assistant", "hi"), ("user", "bye")]
    path.write_text(
        json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}) + "\n"
    )
    assert read_prompts(path) == ["hello"]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    """Other separators of Unicode stand in JSON texts as they are."""
    texts = ["a\u2028b\u2029c\u0085d", "two"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "prompts.jsonl").write_bytes("\r\n".join(lines).encode())
    assert read_prompts(tmp_path / "prompts.jsonl") == texts


@pytest.mark.parametrize(
    "line", ["{}", '{"turns": []}', '{"turns": [3]}', "[1]", "not json", '{"prompt": ""}']
)
def test_a_line_without_a_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl: line 2"):
        read_prompts(path)


def test_check_finds_nothing_and_says_so(
    models: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "check.json"
    pair = ["--target", str(models / "target"), "--draft", str(models / "draft")]
    flags = ["--prompts", str(prompts), "--max-new-tokens", "12", "--batch", "2", "--out", str(out)]
    status = main(["check", *pair, *flags])
    printed = capsys.readouterr().out
    assert status == 0 and "3 prompts: 0 rows differ" in printed
    arms = json.loads(out.read_text())["arms"]
    assert [(arm["decoder"], arm["temperature"], arm["batch"]) for arm in arms] == [
        (decoder, temperature, batch)
        for temperature in (0.0, 0.8)
        for batch in (1, 2)
        for decoder in ("autoregressive", "generate", "stepwise")
    ]
    assert all(arm["tokens"] == arms[0]["tokens"] == 36 for arm in arms[:6])


def test_the_untrained_draft_has_the_blocks_that_are_asked_for(
    models: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkers: list[check.Checker] = []
    monkeypatch.setattr(check, "run", lambda checker, *_: checkers.append(checker) or 0)
    flags = ["check", "--target", str(models / "target"), "--prompts", str(prompts)]
    for size in ([], ["--block-size", "4"], ["--block-size", "16"]):
        assert main([*flags, *size]) == 0
    assert [checker.modes[1].options.largest for checker in checkers] == [8, 4, 16]


def test_every_mode_is_there() -> None:
    modes = check.every_mode(Options(Fixed(4)), testing.target_config("qwen3_5"), tree_budget=5)
    names = [mode.name for mode in modes]
    assert len(names) == len(set(names)) == 23
    for name in ("generate, chain, states", "generate, tree, tape", "generate, tree, states"):
        assert name in names
    for shape, verify in (("chain", "sequential"), ("tree", "batched")):
        for rollback in ("tape", "states", "replay"):
            for bonus in ("implicit", "explicit"):
                assert f"stepwise, {shape}, {rollback}, {verify}, {bonus}" in names


def test_modes_run_in_batches_and_are_lossless() -> None:
    """A hybrid target over 11 tokens, of which even a random draft guesses some."""
    models = testing.make_models(testing.target_config("qwen3_5", num_layers=2))
    modes = check.every_mode(Options(Fixed(4)), models.target.config, tree_budget=5)
    names = ["autoregressive", "generate, tree, states", "stepwise, chain, replay, sequential, explicit"]
    chosen = [next(mode for mode in modes if mode.name == name) for name in names]
    checker = check.Checker(models, [[1, 2, 3, 4, 5], [6, 7]], chosen, (), max_new_tokens=12)
    arms = list(checker.arms([0.0], 2, lambda: None))
    assert [(arm.decoder, arm.batch) for arm in arms] == [(names[0], 1), *((name, 2) for name in names)]
    assert not any(arm.suspicious for arm in arms) and all(arm.tokens == 24 for arm in arms)
    assert arms[2].tau > arms[3].tau > 1, "candidates are accepted, and more in a tree"


def test_modes_without_recurrent_layers_leave_states_out() -> None:
    modes = check.every_mode(Options(Fixed(4)), testing.target_config(), tree_budget=5)
    assert not any("states" in mode.name for mode in modes) and len(modes) == 15
    with pytest.raises(ConfigError, match="tree budget is 0"):
        check.every_mode(Options(Fixed(4)), testing.target_config(), tree_budget=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_wrong_token_is_suspicious(session: Session, temperature: float) -> None:
    """The distance to the token that the target chooses is 0, to another one far: a bug cannot hide."""
    models, how = session.pair.models, sampling(temperature)
    prompt = session.prompt("hello")
    logits = decode.next_logits(models, [prompt])[:, None]
    seed = 5
    chosen = int(choose(logits, how, jnp.asarray([seed]), jnp.asarray([[len(prompt)]]))[0, 0])
    assert lossless.distance(models, prompt, chosen, how, seed) < 1e-6
    wrong = int(np.argmin(np.asarray(logits)[0, 0]))
    [found] = lossless.divergences(models, [prompt], [[chosen, 1]], [[wrong, 1]], how, [seed])
    assert (found.position, found.expected, found.got, found.near_tie) == (0, chosen, wrong, False)


def test_an_output_that_ends_early_is_suspicious(session: Session) -> None:
    prompt = session.prompt("hello")
    [found] = lossless.divergences(session.pair.models, [prompt], [[7, 8]], [[7]], sampling(), [0])
    assert (found.position, found.expected, found.got, found.near_tie) == (1, 8, -1, False)


# --- near-ties --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "temperature", "gap", "near"),
    [
        (np.float32, 0.0, 5e-5, True), (np.float32, 0.0, 0.01, False), (np.float32, 0.7, 5e-5, True),
        (np.float32, 0.7, 0.01, False), (ml_dtypes.bfloat16, 0.0, 0.125, True),
        (ml_dtypes.bfloat16, 0.0, 0.5, False), (ml_dtypes.bfloat16, 0.7, 0.01, True),
        (ml_dtypes.bfloat16, 0.7, 0.125, False), (ml_dtypes.bfloat16, 0.2, 0.125, True),
    ],
)  # fmt: skip
def test_what_rounding_explains_depends_on_the_dtype_and_on_what_is_compared(
    monkeypatch: pytest.MonkeyPatch, dtype: type, temperature: float, gap: float, near: bool
) -> None:
    monkeypatch.setattr(lossless, "distance", lambda *_: gap)
    models = SimpleNamespace(target_params={"weight": np.zeros(1, dtype)})
    [found] = lossless.divergences(models, [[1]], [[2]], [[3]], sampling(temperature), [0])
    assert found.near_tie == near
    assert check.Arm("generate", temperature, 1, 1, 1.0, [found]).suspicious == 1 - near


def test_a_cold_draw_of_large_logits_has_a_gap() -> None:
    """exp(36 / 0.05) is infinite."""
    logits, how = np.array([36.0, 34.0, 0.0], np.float32), sampling(0.05)
    assert lossless.share_distance(logits, 3, 0, 0.5, how) == 0
    assert lossless.share_distance(logits, 3, 1, 0.5, how) == pytest.approx(0.5)


def share_distance(probs: list[float], kept: int, token: int, point: float, **how: Any) -> float:
    return lossless.share_distance(np.log(np.array(probs)), kept, token, point, sampling(1.0, **how))


@pytest.mark.parametrize("kept", [2, 3])
def test_rounding_may_move_the_edge_of_the_nucleus(kept: int) -> None:
    """0.5 + 0.3 completes 0.8 or just does not: tokens 0 and 1 share the interval, or 0, 1 and 2 do."""
    probs = [0.5, 0.3, 0.12, 0.08]
    for token, point in ((0, 0.62), (1, 0.55), (1, 0.95), (2, 0.9)):
        assert share_distance(probs, kept, token, point, top_p=0.8) < 1e-6
    assert share_distance(probs, kept, 2, 0.4, top_p=0.8) > 0.3
    assert share_distance(probs, kept, 3, 0.99, top_p=0.8) > 0.03


def test_rounding_may_swap_tokens_at_the_edge_of_the_best_k() -> None:
    probs = [0.3 - 1e-6, 0.4, 0.3 + 1e-6]
    for token, point in ((2, 0.6), (0, 0.4), (1, 0.1), (1, 0.9)):
        assert share_distance(probs, 2, token, point, top_k=2) < 1e-5
    assert share_distance(probs, 2, 2, 0.2, top_k=2) > 0.2
    assert share_distance([0.1, 0.5, 0.4], 2, 0, 0.01, top_k=2) == pytest.approx(0.3 / 0.9)


def test_a_gap_that_is_not_finite_is_valid_json(tmp_path: Path) -> None:
    never = lossless.Divergence(0, 1, 8, -1, float("inf"), False)
    check._save(tmp_path / "check.json", "", [check.Arm("generate", 0.0, 1, 2, float("nan"), [never])])
    [arm] = json.loads((tmp_path / "check.json").read_text(), parse_constant=pytest.fail)["arms"]
    assert arm["differences"][0]["gap"] is None and arm["tau"] is None
    assert plain_json.text({"a": (1.5, [math.inf])}) == '{"a": [1.5, [null]]}'


def test_time_prints_and_writes_every_part(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "time.json"
    flags = ["--block-sizes", "4", "--new-tokens", "9", "--prompt-tokens", "5", "--repeats", "1"]
    flags += ["--tree-budgets", "3"]
    target = ["--target", str(models / "target"), "--draft", str(models / "draft")]
    assert main(["time", *target, *flags, "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["block 1"]["rounds"] == 8 and figures["block 1"]["tau"] == 1
    assert set(figures["stages of block 4"]) == {
        "draft_ms",
        "verify_ms",
        "accept_ms",
        "commit_ms",
        "round_ms",
    }
    tree = figures["tree of 3, block 4"]
    assert tree["tree_share"] == pytest.approx(tree["tree_ms"] / tree["round_ms"])
    assert all(value > 0 for part in list(figures.values())[1:] for value in part.values())
    assert "stages of block 4" in capsys.readouterr().out
