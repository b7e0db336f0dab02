"""The figures of a draft: foretold on held-out conversations, and measured in the real decoder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import DRAFT, TARGET

from dflash_jax import decode
from dflash_jax.config import ConfigError
from dflash_jax.drafts import DFlash
from dflash_jax.drafts import abstract_params as abstract_draft
from dflash_jax.policy import Fixed
from dflash_jax.state import AUTOREGRESSIVE, Models, Options
from dflash_jax.targets import abstract_params, make_target
from dflash_jax.terminal import Screen
from dflash_jax.testing import draft_config, make_models, random_params, scripted, target_config
from dflash_jax.tokenizer import ByteTokenizer
from dflash_jax.weights import hf
from train import build, byte_vocabulary, evaluate, export, step
from train.conversations import Example
from train.corpus import Corpus, pack
from train.settings import Data, Run, Settings, Synthesize

SETUP = step.Setup(make_target(TARGET), DFlash(DRAFT), anchors=4, gamma=2.0, chunk=64)


def corpus(rows: int = 5, temperature: float = 0.0) -> Corpus:
    generator = np.random.default_rng(0)
    made = []
    for i in range(rows):
        supervised = np.zeros(14 + i, bool)
        supervised[5:9] = supervised[11:] = True
        tokens = generator.integers(4, 8, len(supervised)).astype(np.int32)
        made.append(Example(tokens, supervised, str(i), temperature))
    return pack(made)


@pytest.fixture(scope="module")
def params() -> tuple[dict, dict]:
    return random_params(abstract_params(TARGET)), random_params(abstract_draft(DRAFT), 1)


# --- foretold -----------------------------------------------------------------------------------------


def test_the_walk_goes_through_each_answer_on_its_own() -> None:
    data = corpus(1)  # answers at 5..8 and 11..13
    accepted = np.zeros((1, 14), np.int32)
    accepted[0, 5], accepted[0, 11] = 1, 3
    assert evaluate.walks(data, accepted, 0) == [2, 1, 2]  # what lies beyond an answer's end does not count
    assert evaluate.walks(data, accepted[:, :8], 0) == [2]


def test_neither_batches_nor_slices_change_the_figures(params: tuple[dict, dict]) -> None:
    data = corpus(5)
    data = dataclasses.replace(data, temperature=np.array([0, 0, 0.5, np.nan, 0.7], np.float32))
    whole = evaluate.held_out(dataclasses.replace(SETUP, anchors=32), *params, data, 5, 32)
    parts = evaluate.held_out(SETUP, *params, data, 2, 32)  # a batch with a filler, three slices
    assert whole.keys() == parts.keys()
    for name in whole:
        np.testing.assert_allclose(whole[name], parts[name], rtol=1e-5, err_msg=name)
    assert len(whole["accuracy"]) == len(whole["recall16"]) == DRAFT.block_size - 1
    assert all(r >= a for r, a in zip(whole["recall16"], whole["accuracy"], strict=True))
    assert 1 <= whole["walk"] <= DRAFT.block_size
    few = evaluate.held_out(SETUP, *params, data.rows(np.array([0, 1])), 2, 32)
    assert few["walk_greedy"] == whole["walk_greedy"] and np.isnan(few["walk_sampled"])


def test_states_of_a_store_are_used(params: tuple[dict, dict]) -> None:
    data = corpus(3)

    class Store:
        def read(self, rows: np.ndarray, width: int) -> tuple[np.ndarray, None]:
            batch = jax.tree.map(jnp.asarray, data.batch(rows, width))
            features, _ = step.target_states(SETUP, params[0], batch)
            return np.asarray(features) * self.gain, None

        gain = np.float32(1)

    online = evaluate.held_out(SETUP, *params, data, 2, 32)
    store = Store()
    stored = evaluate.held_out(SETUP, *params, data, 2, 32, store)
    np.testing.assert_allclose(stored["loss"], online["loss"], rtol=1e-5)
    store.gain = np.float32(0)  # hidden_norm would undo any other factor
    assert evaluate.held_out(SETUP, *params, data, 2, 32, store)["loss"] != pytest.approx(
        online["loss"], rel=1e-3
    )


def test_nothing_to_evaluate_is_an_error(params: tuple[dict, dict]) -> None:
    with pytest.raises(ConfigError, match="within 5 positions"):
        evaluate.held_out(SETUP, *params, corpus(2), 2, 5)


def test_a_sample_is_the_same_every_time_and_not_every_other_row() -> None:
    data = corpus(40)
    data = dataclasses.replace(data, temperature=np.tile(np.float32([0, 0.5]), 20))
    found = evaluate.sample(data, 20)
    assert len(found) == 20 and set(found.temperature.tolist()) == {0, 0.5}
    assert np.array_equal(found.tokens, evaluate.sample(data, 20).tokens)
    assert len(evaluate.sample(data, 99)) == 40


def test_the_batch_shape_holds_the_longest_and_a_microbatch() -> None:
    data = corpus(5)  # up to 18 positions
    settings = Settings(name="", target="", data=Data(max_length=512, tokens=512))
    assert evaluate.batch_shape(data, settings) == (5, 32)
    assert evaluate.batch_shape(corpus(30), settings) == (8, 64)
    settings = Settings(name="", target="", data=Data(max_length=40, tokens=64))
    assert evaluate.batch_shape(corpus(30), settings) == (1, 40)


# --- measured -----------------------------------------------------------------------------------------


def test_the_decoder_is_asked_row_by_row() -> None:
    """A draft that recites the target's own text is right everywhere; nine prompts leave a batch of one."""
    target = target_config()
    models = make_models(target, draft_config(target, block_size=4))
    prompts = np.random.default_rng(0).integers(0, 11, (9, 5)).tolist()
    plain = decode.complete(models.without_draft(), prompts, AUTOREGRESSIVE, max_new_tokens=13)
    # every batch of eight recites the first eight texts: the ninth prompt is the first again
    prompts[8] = prompts[0]
    texts = [p + t for p, t in zip(prompts, [*plain.tokens[:8], plain.tokens[0]], strict=True)]
    found = evaluate.decoded(scripted(models, texts[:8]), prompts, 0.0, 13, ())
    assert found == {
        "temperature": 0.0, "prompts": 9, "tokens": 9 * 13, "rounds": 9 * 3, "tau": 4.0, "acceptance": [1.0] * 3,
    }  # fmt: skip
    wrong = np.zeros((8, 18), bool)
    wrong[:, 7::2] = True
    half = evaluate.decoded(scripted(models, texts[:8], wrong), prompts, 0.0, 13, ())
    assert half["tau"] == 2.0 and half["acceptance"] == [1.0, 0.0, 0.0] and half["rounds"] == 9 * 6


def test_sampled_figures_are_those_of_the_decoder_itself(params: tuple[dict, dict]) -> None:
    models = Models(*params, make_target(TARGET), DFlash(DRAFT))
    prompts = [[5, 6, 7], [8, 9]]
    found = evaluate.decoded(models, prompts, 0.7, 20, ())
    again = decode.complete(
        models, prompts, Options(Fixed(4)), max_new_tokens=20, how=evaluate.sampling(0.7), seeds=[0, 1]
    )
    assert (found["tau"], found["acceptance"]) == (again.tau, again.acceptance_by_position())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"turns": []}', "line 2: turns is empty"),
        ('{"prompt": ""}', "line 2: prompt is empty"),
        ('{"text": "x"}', "line 2: prompt is missing"),
        ("{", "line 2 is not valid JSON"),
    ],
)
def test_prompts_that_cannot_be_used(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"turns": ["a", "b"]}}\n{line}\n')
    with pytest.raises(ConfigError, match=says):
        evaluate.read_prompts(path, None, 9)  # type: ignore[arg-type]


# --- the command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A target that babbles bytes, a random draft of it where `fit` puts one, and conversations."""
    folder = tmp_path_factory.mktemp("run")
    target = dataclasses.replace(TARGET, vocab_size=byte_vocabulary.SIZE)
    draft = dataclasses.replace(DRAFT, vocab_size=byte_vocabulary.SIZE)
    weights = jax.tree.map(np.asarray, random_params(abstract_params(target)))
    hf.save_target(folder / "target", target, weights, np.float32)
    byte_vocabulary.write(folder / "target")
    made = Settings(
        name="test", target=str(folder / "target"), run=Run(folder=folder, evaluate_conversations=3),
        data=Data(max_length=64, tokens=128, held_out=0.3), synthesize=Synthesize(answer_tokens=9),
    )  # fmt: skip
    of_draft = jax.tree.map(np.asarray, random_params(abstract_draft(draft), 1))
    export.write_draft(folder / "draft", draft, of_draft, made, {}, {}, build.load_target(made))
    lines = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"yes, {i}"}]}
        for i in range(12)
    ]
    (folder / "conversations.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return made


def test_the_command_reports_and_writes(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text('{"turns": ["Why?", "And?"]}\n{"prompt": "' + "long " * 20 + '"}\n')
    with Screen() as screen:
        out = tmp_path / "figures.json"
        assert evaluate.run(settings, screen, None, prompts, out) == 0
    found, said = json.loads(out.read_text()), capsys.readouterr().out
    assert f"tau {found['held_out']['walk']:.3f} by the walk" in said
    assert [one["temperature"] for one in found["decoder"]["runs"]] == [0.0, 0.7]
    for one in found["decoder"]["runs"]:
        assert f"tau {one['tau']:.3f}" in said and one["prompts"] == 2 and one["tokens"] > 2
    assert found["decoder"]["prompts"] == "asked.jsonl"
    assert "accepted, T=0.7" in said and "recall@16" in said


@pytest.mark.parametrize("given", [False, True])
def test_prompts_are_of_the_file_or_held_out(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """A draft can be measured on prompts where its conversations are not."""
    seen: list[list[list[int]]] = []

    def measure(settings: Settings, target: Any, config: Any, params: Any, asked: Any, name: str) -> dict:
        seen.append(asked)
        return {"prompts": name, "runs": []}

    monkeypatch.setattr(evaluate, "measure", measure)
    prompts = None
    if given:
        prompts = tmp_path / "asked.jsonl"
        prompts.write_text('{"prompt": "7?"}')
        settings = dataclasses.replace(
            settings, data=dataclasses.replace(settings.data, files=(Path("no.jsonl"),))
        )
    words = build.load_target(settings).tokenizer
    with Screen() as screen:
        evaluate.run(settings, screen, None, prompts, tmp_path / "out.json")
    possible = [words.chat([{"role": "user", "content": f"{i}?"}]) for i in ([7] if given else range(12))]
    assert len(seen[0]) == (1 if given else 3)
    assert all(prompt in possible for prompt in seen[0])
    assert ("held_out" in json.loads((tmp_path / "out.json").read_text())) != given


def test_without_a_draft_the_next_step_is_named(settings: Settings, tmp_path: Path) -> None:
    settings = dataclasses.replace(settings, run=dataclasses.replace(settings.run, folder=tmp_path))
    with Screen() as screen, pytest.raises(ConfigError, match=r"no draft there: run `python -m train fit`"):
        evaluate.run(settings, screen, None, None, None)


def test_prompts_that_leave_no_room_are_an_error(settings: Settings) -> None:
    target = dataclasses.replace(TARGET, max_positions=16)
    loaded = evaluate.pair.Target(target, make_target(target), {"x": jnp.zeros(1)}, ByteTokenizer(), "t")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"asked: no prompt leaves room for synthesize.answer_tokens \(9\)"):
        evaluate.measure(settings, loaded, DRAFT, {}, [[1] * 8], "asked")
