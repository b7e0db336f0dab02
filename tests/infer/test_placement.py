"""A draft elsewhere, embeddings on the host and a draft window, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import folders
import pytest

from infer.__main__ import main
from infer.session import Session
from infer.settings import Settings


@pytest.fixture
def run(models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """(exit status, stdout, stderr) of `generate`."""
    monkeypatch.chdir(models)

    def command(*flags: str, target: str = "target", draft: str = "draft") -> tuple[int, str, str]:
        given = ["--target", target, "--draft", draft, "--prompt", "hi", "--max-new-tokens", "12"]
        status = main(["generate", *given, *flags])
        return (status, *capsys.readouterr())

    return command


def test_placed_text_is_the_text(run, session: Session) -> None:
    plain = session.complete("hi", Settings(max_new_tokens=12))
    flags = (
        "--draft-device",
        "cpu:1",
        "--embedding",
        "host",
        "--draft-window",
        "4",
        "--draft-vocabulary",
        "9",
        "--json",
    )
    status, out, err = run(*flags)
    answer = json.loads(out)
    assert status == 0 and answer["tokens"] == plain.tokens
    assert answer["device"] == "cpu:0, draft on cpu:1"
    assert answer["draft_vocabulary"] == 9
    assert 0 < answer["seconds"]["embedding"] < sum(answer["seconds"].values())
    notes = err.splitlines()
    table = folders.VOCAB * folders.HIDDEN * 4 / 1e6
    assert len(notes) == 3
    assert notes[0].endswith(f"the embedding table of target stays on the host: {table:.1f} MB less on cpu:0")
    assert "the draft sees the last 4 positions (--draft-window)" in notes[1]
    assert notes[2].endswith("from Python, for a draft on another device, embeddings on the host")


def test_nothing_is_saved_where_the_table_is_the_head(run, models: Path) -> None:
    folders.target(models / "tied", tie_word_embeddings=True)
    status, _, err = run("--embedding", "host", target="tied")
    assert status == 0 and "is its head too and stays on cpu:0: nothing is saved there" in err
    assert "embedding 0." in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "draft", "message"),
    [
        (("--draft-window", "0"), "draft", "draft_window is 0"),
        (("--draft-device", "cpu:99"), "draft", "device 'cpu:99' does not exist here"),
        (("--draft-device", "cpu:1"), "none", "draft_device cpu:1 needs a draft, and there is none"),
        (("--draft-window", "9"), "none", "draft_window 9 needs a draft, and there is none"),
    ],
)
def test_one_sentence_for_what_cannot_be(run, flags: tuple[str, ...], draft: str, message: str) -> None:
    status, out, err = run(*flags, draft=draft)
    assert status == 2 and out == "" and message in err and err.count("\n") == 1
