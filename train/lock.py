"""One `fit` at a time in a folder: two would write each other's checkpoints and remove each other's half ones."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

from dflash_jax.config import ConfigError

FILE = "lock"

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the folder. ConfigError when somebody else does. The system lets go of it when a process ends, however
    it ends: a killed run leaves the file and no lock."""
    with (folder / FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another `fit` is running there: wait for it, or choose another run.folder"
            ) from None
        except OSError as error:  # some network file systems have no locks
            _log.warning("%s cannot be locked (%s): start no other `fit` there", folder, error.strerror)
        yield
