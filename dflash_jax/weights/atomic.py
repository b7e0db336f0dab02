"""Writing a file so that a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dflash_jax.config import ConfigError


def check_writable(path: Path) -> None:
    """Before the work, not after it: `path` is a file that can be replaced, or a new name in a folder."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist: create it first")
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder: give a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is no regular file, and is not replaced: give another name")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write; it takes the name `path` when the block ends without an error, and
    disappears otherwise. The bytes are on the disk before the name is."""
    with replacing_name(path) as name, open(name, "wb") as file:
        yield file


@contextlib.contextmanager
def replacing_name(path: Path) -> Iterator[Path]:
    """The same for a writer that opens its file itself: the name of an empty file beside `path`."""
    check_writable(path)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
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
