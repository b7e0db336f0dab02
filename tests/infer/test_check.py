"""`check`, what it rests on, and `time`: at tiny sizes, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import decode, testing
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
