"""Notebooks are committed as pairs: NAME.py to read and change, NAME.ipynb with what it showed when it was executed.

`make notebooks` writes the second from the first. CI executes them smaller (.ci/run), `make slow` at full size.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))

_MARK = re.compile(r"^# %%( \[markdown\])?$", re.MULTILINE)
_ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|opt|work|usr|var|mnt|Users|private)/\w")


def cells_of(text: str) -> list[tuple[str, str]]:
    """(kind, source) of each cell of a percent script, as jupytext reads it."""
    parts = _MARK.split(text)[1:]
    found = []
    for mark, body in zip(parts[::2], parts[1::2], strict=True):
        source = body.strip("\n")
        if mark:
            source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        found.append(("markdown" if mark else "code", source))
    return found


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", ())]


def test_every_script_has_its_notebook() -> None:
    assert len(NAMES) >= 5
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_pair_has_the_same_cells(name: str) -> None:
    notebook = [(cell["cell_type"], "".join(cell["source"])) for cell in read(name)["cells"]]
    assert notebook == cells_of((FOLDER / f"{name}.py").read_text("utf-8")), "run `make notebooks`"


@pytest.mark.parametrize("name", NAMES)
def test_notebook_was_executed_in_one_go(name: str) -> None:
    notebook = read(name)
    ran = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert ran == list(range(1, len(ran) + 1))
    kinds = {output["output_type"] for output in outputs(notebook)}
    assert "error" not in kinds and kinds
    assert all(output.get("name") != "stderr" for output in outputs(notebook))


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_small_and_names_no_place_of_a_machine(name: str) -> None:
    notebook = read(name)
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 1_000_000
    said = [cell["source"] for cell in notebook["cells"]]
    said += [output.get("text") for output in outputs(notebook)]
    said += [{**output.get("data", {}), "image/png": ""} for output in outputs(notebook)]
    assert not _ABSOLUTE.findall(json.dumps(said))


def test_cells_of_a_script() -> None:
    text = "# ---\n# jupyter:\n# ---\n\n# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = 1\n\n\n# %%\ndef f():\n    pass\n"
    assert cells_of(text) == [("markdown", "# A\n\nb"), ("code", "x = 1"), ("code", "def f():\n    pass")]
    assert _ABSOLUTE.search('"/home/me/x"') and not _ABSOLUTE.search("https://x.org/opt/y a/tmp/b")
