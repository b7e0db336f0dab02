"""The command line as scripts use it: what is printed where, exit statuses, one-sentence errors."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import folders
import pytest

import infer.session
from infer.__main__ import main
from infer.options import COMMANDS
from infer.parse import overview, parse
from infer.session import Session

ROOT = Path(__file__).parent.parent.parent
KEYS = [
    *("text", "tokens", "prompt_tokens", "finish_reason", "rounds", "committed", "tau"),
    *("acceptance_by_position", "seconds", "tokens_per_second", "dtype", "device", "mode"),
    *("block_size", "target", "draft", "draft_vocabulary", "versions"),
]


@pytest.fixture
def run(models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """`generate` on the tiny target: (exit status, stdout, stderr)."""
    monkeypatch.chdir(models)

    def command(*flags: str) -> tuple[int, str, str]:
        status = main(["generate", "--target", "target", "--max-new-tokens", "8", *flags])
        return (status, *capsys.readouterr())

    return command


def test_text_goes_to_stdout_and_the_rest_to_stderr(run, session: Session) -> None:
    status, out, err = run("--draft", "draft", "--prompt", "hi")
    answer = session.complete("hi", infer.session.Settings(max_new_tokens=8))
    assert status == 0 and out == answer.text + "\n"
    assert "8 tokens (length)" in err and "tokens per round" in err


def test_streamed_text_is_the_text(run) -> None:
    flags = ("--prompt", "hi", "--temperature", "1", "--seed", "3")
    whole, streamed = run(*flags), run(*flags, "--stream")
    assert streamed[1] == whole[1]
    assert "note: stepping through the rounds from Python, for streaming" in streamed[2]


def test_json_is_one_object(run) -> None:
    status, out, err = run("--draft", "draft", "--prompt", "hi", "--json", "--logprobs")
    answer = json.loads(out)
    assert status == 0 and err == "" and out.count("\n") == 1
    assert list(answer) == [*KEYS, "logprobs"]
    assert len(answer["tokens"]) == 8 == len(answer["logprobs"])
    assert sum(answer["committed"]) == 7 and len(answer["committed"]) == answer["rounds"]
    assert answer["tau"] == pytest.approx(7 / answer["rounds"])
    assert list(answer["seconds"]) == ["load", "compile", "prefill", "decode"]
    assert answer["tokens_per_second"] == pytest.approx(7 / answer["seconds"]["decode"])
    assert (answer["mode"], answer["block_size"]) == ("chain", folders.BLOCK)
    assert (answer["target"], answer["draft"]) == ("target", "draft")
    assert (answer["dtype"], answer["device"]) == ("float32", "cpu:0")
    assert set(answer["versions"]) == {"dflash_jax", "python", "jax", "jaxlib", "flax"}


def test_json_without_a_draft_or_without_a_token(run) -> None:
    answer = json.loads(run("--prompt", "hi", "--json")[1])
    assert list(answer) == KEYS
    assert (answer["mode"], answer["draft"], answer["block_size"]) == ("ar", None, 1)
    answer = json.loads(run("--prompt", "hi", "--json", "--max-new-tokens", "0")[1])
    assert answer["tokens"] == [] and answer["text"] == "" and answer["finish_reason"] == "length"
    assert answer["tau"] is None and answer["tokens_per_second"] is None and answer["rounds"] == 0


def test_prompts_from_files(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hi\n")
    expected = run("--prompt", "hi")[1]
    assert run("--prompt-file", str(file))[1] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n")))
    assert run("--prompt-file", "-")[1] == expected


def test_a_raw_prompt_may_begin_with_a_dash_or_be_called_none(run) -> None:
    assert run("--raw", "--prompt=-x")[0] == 0
    assert run("--raw", "--prompt", "None")[0] == 0


def test_logprobs_are_listed(run) -> None:
    lines = run("--prompt", "hi", "--logprobs")[1].splitlines()[-8:]
    assert all(float(line.split()[0]) <= 0 for line in lines)


def test_trace_is_written(run, tmp_path: Path) -> None:
    status, _, _ = run("--draft", "draft", "--prompt", "hi", "--trace", str(tmp_path / "t.json"))
    seen = json.loads((tmp_path / "t.json").read_text())
    assert status == 0 and seen["draft"] == "draft" and sum(r["kept"] for r in seen["rounds"]) == 7


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--prompt", ""], "the prompt is empty"),
        ([], "give the prompt with --prompt or --prompt-file, one of them"),
        (["--prompt", "a", "--prompt-file", "b"], "one of them"),
        (
            ["--prompt-file", "missing.txt"],
            "missing.txt: the prompt cannot be read (No such file or directory)",
        ),
        (["--prompt-file", "draft/model.safetensors"], "draft/model.safetensors: not UTF-8 text (byte"),
        (["--prompt-file", "empty.txt"], "empty.txt: the prompt is empty"),
        (["--prompt", "a", "--temperature", "-1"], "temperature is -1.0: it must be 0 (greedy) or positive"),
        (["--prompt", "a", "--max-new-tokens", "-1"], "max_new_tokens is -1"),
        (["--prompt", "a", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["--prompt", "a" * 600], "the context of target is 512: shorten one of them"),
        (["--prompt", "a", "--block-size", "4"], "block_size 4 needs a draft"),
        (["--prompt", "a", "--draft", "draft", "--block-size", "9"], "block size 9 cannot be used"),
        (["--prompt", "a", "--draft", "narrow"], "its hidden size is 64, this target's is 32"),
        (["--prompt", "a", "--draft", "absent"], "'absent' is no file, no folder, no hub id"),
        (["--prompt", "a", "--stop", ""], "stop string is empty"),
        (["--prompt", "a", "--stream", "--json"], "choose one"),
        (["--prompt", "a", "--trace", "no/where.json"], "no/where.json: the folder no does not exist"),
        (["--prompt", "a", "--device", "abacus"], "device 'abacus' does not exist here"),
        (["--prompt", "a", "--mode", "tree"], "mode tree needs a draft"),
        (["--prompt", "a", "--mode", "forest"], "forest"),
        (
            ["--prompt", "a", "--policy", "adaptive", "--proposal", "sample", "--temperature", "1"],
            "fixed policy",
        ),
        (["--prompt", "a", "--tree-budget", "0"], "tree budget is 0"),
        (["--prompt", "a", "--mode", "chain", "--tree-budget", "4"], "tree_budget is for trees"),
        (["--prompt", "a", "--tree", "4"], "Unrecognized options: --tree, 4"),
        (["--prompt", "a", "--temprature", "1"], "did you mean '--temperature'?"),
        (["--prompt", "a", "--dtype", "int4"], "int4"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence_and_status_2(run, models: Path, flags: list[str], says: str) -> None:
    (models / "empty.txt").write_text("\n")
    if not (models / "narrow").exists():
        folders.draft(models / "narrow", hidden_size=64)
    status, out, err = run(*flags)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "a command is missing: python -m infer {demo,generate,chat,inspect"),
        (["generat"], "'generat' is not a command (did you mean 'generate'?)"),
        (["generate"], "--target"),
        (["generate", "--target", "smolm2", "--prompt", "a"], "did you mean 'smollm2'?"),
        (["generate", "--target", "missing.gguf", "--prompt", "a"], "missing.gguf: no such file or folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_that_lead_nowhere(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_failures_are_status_1_and_debug_shows_where(
    run, monkeypatch: pytest.MonkeyPatch, models: Path
) -> None:
    def no_memory(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nbuffers ...")

    monkeypatch.setattr(infer.session.decode, "prefill", no_memory)
    status, _, err = run("--prompt", "hi")
    assert status == 1
    assert err == "error: RuntimeError: RESOURCE_EXHAUSTED: out of memory (--debug shows where)\n"
    assert "Traceback" in run("--prompt", "hi", "--debug")[2]


def test_interrupting_is_not_a_traceback(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(infer.session.decode, "prefill", interrupted)
    assert run("--prompt", "hi")[::2] == (130, "\n")


# --- help, and a process of its own -----------------------------------------------------------------------


def test_help_has_an_example_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert f"python -m infer {name}" in overview()
        with pytest.raises(SystemExit) as exit:
            parse([name, "--help"])
        assert exit.value.code == 0
        assert f"python -m infer {name}" in capsys.readouterr().out


def test_a_process_of_its_own(models: Path, tmp_path: Path) -> None:
    """Warm and cold start share the cache of compiled programs; help needs no JAX."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    flags = ["--target", str(models / "target"), "--prompt", "hi", "--max-new-tokens", "4", "--json"]
    command = [sys.executable, "-m", "infer", "generate", *flags]
    first, second = (
        subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True) for _ in range(2)
    )
    assert first.returncode == 0 and first.stderr == ""
    assert json.loads(first.stdout)["tokens"] == json.loads(second.stdout)["tokens"]
    assert any((tmp_path / "dflash-jax" / "xla").iterdir())
    code = "import sys; from infer.__main__ import main\ntry: main(['-h'])\nfinally: assert 'jax' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and "usage: python -m infer COMMAND" in result.stdout
