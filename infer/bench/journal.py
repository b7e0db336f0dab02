"""What was measured so far, one line per prompt, so that a killed run continues where it was.

The first line says what is measured. A run with other settings, weights, programs or hardware does not mix
with it: figures of two machines are not comparable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_jax.config import ConfigError
from dflash_jax.journal import Journal
from infer.bench.measure import Prompt, Record

FILE = "journal.jsonl"


class Measured:
    """Records by prompt, on the disk when a folder is given (it is made). about: what is measured.

    compile_seconds: by arm, one dictionary for each start."""

    def __init__(self, folder: Path | None, about: Mapping[str, Any]):
        self.about = about
        self.records: list[Record] = []
        self.compile_seconds: list[dict[str, float]] = []
        self._known: set[tuple[str, int]] = set()
        self._journal = None if folder is None else _open(folder)
        if self._journal is not None:
            lines = self._journal.path.read_text("utf-8").splitlines()
            if lines:
                self._read(self._journal.path, lines)
            else:
                self._journal.append([json.dumps({"about": about})])

    def __contains__(self, prompt: Prompt) -> bool:
        return (prompt.dataset, prompt.line) in self._known

    def add(self, prompt: Prompt, records: Sequence[Record]) -> None:
        """What all arms did on a prompt: one line, so that a prompt is there for all of them or for none."""
        self.records += records
        self._known.add((prompt.dataset, prompt.line))
        self._write({"records": [asdict(record) for record in records]})

    def compiled(self, seconds: dict[str, float]) -> None:
        self.compile_seconds.append(seconds)
        self._write({"compiled": seconds})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._journal is not None:
            self._journal.append([json.dumps(line)])

    def _read(self, path: Path, lines: Sequence[str]) -> None:
        try:
            first, *rest = map(json.loads, lines)
            before = first["about"]
            found = [Record(**record) for line in rest for record in line.get("records", ())]
            self.compile_seconds = [line["compiled"] for line in rest if "compiled" in line]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: is not the journal of a benchmark ({error!r}): give another folder with --out"
            ) from None
        for key, value in json.loads(json.dumps(self.about)).items():
            if before.get(key) != value:
                raise ConfigError(
                    f"{path}: was measured with other {key}, so this run cannot continue it: give another folder with "
                    "--out, or remove that file"
                )
        self.records = found
        self._known = {(record.dataset, record.line) for record in found}


def _open(folder: Path) -> Journal:
    try:
        return Journal(folder / FILE)
    except OSError as error:
        raise ConfigError(f"{folder}: --out cannot be written ({error.strerror})") from None
