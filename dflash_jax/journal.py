"""A file of JSON lines that grows batch by batch and survives being killed at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from dflash_jax.weights.atomic import replacing


class Journal:
    """What was appended before a kill stays, and half a line does not: opening removes it.

    The folder is made. A last line that is whole but lacks its newline (a file written by hand) is kept.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            _repair(file)

    def append(self, lines: Iterable[str]) -> None:
        """On the disk when this returns."""
        with self.path.open("ab") as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def rewrite(self, lines: Iterable[str]) -> None:
        """Put these lines in the file's place, at once."""
        with replacing(self.path) as file:
            for line in lines:
                file.write(f"{line}\n".encode())


def _repair(file: BinaryIO) -> None:
    """From the last newline on: a torn line goes, a whole one gets its newline."""
    end = file.seek(0, os.SEEK_END)
    start, last = end, b""
    while start > 0 and b"\n" not in last:
        step = min(start, 1 << 16)
        start -= step
        file.seek(start)
        last = file.read(step) + last
    newline = last.rfind(b"\n") + 1
    rest = last[newline:]
    if not rest:
        return
    try:
        json.loads(rest)
    except ValueError:
        file.truncate(start + newline)
    else:
        file.write(b"\n")
