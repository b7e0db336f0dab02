"""Writing a file so that a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write; it takes the name `path` when the block ends without an error, and
    disappears otherwise. The bytes are on the disk before the name is."""
    with replacing_name(path) as name, open(name, "wb") as file:
        yield file


@contextlib.contextmanager
def replacing_name(path: Path) -> Iterator[Path]:
    """The same for a writer that opens its file itself: the name of an empty file beside `path`."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    try:
        yield Path(name)
        with open(name, "rb") as file:
            os.fsync(file.fileno())
        # mkstemp makes the file private; a model file should be as readable as any other new file
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
