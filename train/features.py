"""The target's hidden states, written once (`features`), and the store that training reads them from.

    index.json     what they are of: target, taps, dtype, tokenizer
    rows.bin       a record per conversation: 16 bytes of its tokens' sha256, its length (i32)
    features.bin   [positions, taps * D] bfloat16, the conversations one after the other
    final.bin      [positions, D] bfloat16: the last states after the norm, written for soft labels only

A record is appended when its states are on the disk, so a killed command continues where it was; and as
conversations are found by their tokens, it also adds those that are new, and any split or order can be read.
Rounding to bfloat16 is 1 part in 256 of a state, as of a target that runs in bfloat16.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dflash_jax import pair
from dflash_jax.config import ConfigError
from dflash_jax.terminal import Screen
from dflash_jax.tokenizer import ByteTokenizer, Tokenizer
from dflash_jax.weights.atomic import replacing
from dflash_jax.weights.tensors import BFLOAT16, flatten
from train import build, corpus, widths
from train.corpus import Corpus
from train.progress import Progress
from train.settings import Data, Settings
from train.step import Setup, stored_states

_VERSION = 1
_INDEX, _ROWS, _FEATURES, _FINAL = "index.json", "rows.bin", "features.bin", "final.bin"
_RECORD = np.dtype([("key", "V16"), ("length", "<i4")])
_GIB = 2**30


# --- what states belong to --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """What must be the same for stored states to be those that a step would compute. dtype: of the target's
    weights and activations. final: whether the last states are there."""

    target: str
    taps: tuple[int, ...]
    dtype: str
    tokenizer: str
    hidden_size: int
    final: bool

    @property
    def columns(self) -> int:
        return len(self.taps) * self.hidden_size

    @property
    def position_bytes(self) -> int:
        return 2 * (self.columns + self.hidden_size * self.final)


def origin(target: pair.Target, setup: Setup) -> Origin:
    return Origin(
        target=target_digest(target),
        taps=setup.draft.config.taps,
        dtype=str(jax.tree.leaves(target.params)[0].dtype),
        tokenizer=tokenizer_digest(target.tokenizer),
        hidden_size=target.config.hidden_size,
        final=setup.soft > 0,
    )


def target_digest(target: pair.Target) -> str:
    """sha256 of the target's config and of one row from the middle of every tensor, rounded to bfloat16:
    the same whatever dtype the target was loaded in."""
    found = hashlib.sha256(json.dumps(target.config.fields(), sort_keys=True).encode())
    for name, leaf in sorted(flatten(target.params).items()):
        row = np.asarray(leaf[leaf.shape[0] // 2] if leaf.ndim > 1 else leaf)
        found.update(name.encode())
        found.update(row.astype(ml_dtypes.bfloat16).tobytes())
    return found.hexdigest()


def tokenizer_digest(tokenizer: Tokenizer | ByteTokenizer) -> str:
    """sha256 of every token's bytes. (How a text is cut into them shows in the conversations' tokens.)"""
    found = hashlib.sha256()
    for id in range(tokenizer.vocab_size):
        spelt = tokenizer.token_bytes(id, skip_special=False)
        found.update(len(spelt).to_bytes(4, "little") + spelt)
    return found.hexdigest()


# --- reading ----------------------------------------------------------------------------------------------


class Store:
    """Random access to the states of the conversations of one corpus, through memory maps."""

    def __init__(self, folder: Path, origin: Origin, starts: np.ndarray, lengths: np.ndarray):
        self._starts, self._lengths = starts, lengths
        self._features = _mapped(folder / _FEATURES, origin.columns)
        self._final = _mapped(folder / _FINAL, origin.hidden_size) if origin.final else None

    def read(self, rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray | None]:
        """(features [..., width, P*D], final [..., width, D] or None) bfloat16 of these row numbers of the
        corpus; 0 beyond a conversation's end."""
        features = self._gather(self._features, rows, width)
        return features, None if self._final is None else self._gather(self._final, rows, width)

    def _gather(self, states: np.ndarray, rows: np.ndarray, width: int) -> np.ndarray:
        rows = np.asarray(rows)
        out = np.empty((rows.size, width, states.shape[1]), np.uint16)
        for i, row in enumerate(rows.ravel()):
            count = min(int(self._lengths[row]), width)
            out[i, :count] = states[self._starts[row] : self._starts[row] + count]
            out[i, count:] = 0
        return out.view(BFLOAT16).reshape(*rows.shape, width, states.shape[1])


def open_store(folder: Path, target: pair.Target, setup: Setup, of: Corpus) -> Store:
    """Raises ConfigError, naming the field, when the states are those of another target, other taps, another
    dtype or tokenizer, and when conversations of the corpus are missing."""
    wanted = origin(target, setup)
    there = _stored(folder, wanted)
    if there is None:
        raise ConfigError(f"{folder}: no store of features: write it with `python -m train features`")
    records = _records(folder, there)
    place = {record["key"].tobytes(): i for i, record in enumerate(records)}
    found = [place.get(key, -1) for key in keys(of)]
    if -1 in found:
        raise ConfigError(
            f"{folder}: {found.count(-1)} of {len(of)} conversations are missing: "
            "run `python -m train features` again, which adds them"
        )
    lengths = records["length"].astype(np.int64)
    slots = np.array(found, np.int64)
    return Store(folder, wanted, (np.cumsum(lengths) - lengths)[slots], lengths[slots])


def keys(of: Corpus) -> list[bytes]:
    """What conversations are found by."""
    return [
        hashlib.sha256(tokens[:length].astype("<i4").tobytes()).digest()[:16]
        for tokens, length in zip(of.tokens, of.length, strict=True)
    ]


def _mapped(path: Path, columns: int) -> np.ndarray:
    whole = path.stat().st_size // (2 * columns)  # a killed command may have left half a row
    return np.asarray(np.memmap(path, np.uint16, "r", shape=(whole, columns)))


def _stored(folder: Path, wanted: Origin) -> Origin | None:
    """The origin of what is there, which serves `wanted`; None when there is no store."""
    path = folder / _INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_bytes())
        version, there = index["version"], index["origin"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: is no index of a store of features: delete the folder") from None
    if version != _VERSION:
        raise ConfigError(
            f"{path}: version is {version}, not {_VERSION}: delete the folder and write it again"
        )
    for name, value in _plain(wanted).items():
        if name != "final" and there.get(name) != value:
            raise ConfigError(
                f"{path}: {name} is {there.get(name)}, but of this run it is {value}: choose another "
                "features.store, or delete the folder and write it again"
            )
    if wanted.final and not there.get("final"):
        raise ConfigError(
            f"{path}: final is false, but objective.soft needs the target's last states: choose another "
            "features.store, or delete the folder and write it again"
        )
    return dataclasses.replace(wanted, final=bool(there.get("final")))


def _records(folder: Path, origin: Origin) -> np.ndarray:
    """Records of conversations whose states are complete: a kill can leave half a record, and a disk that
    lost its power a record without its states."""
    path = folder / _ROWS
    raw = path.read_bytes() if path.is_file() else b""
    records = np.frombuffer(raw, _RECORD, len(raw) // _RECORD.itemsize)
    whole = min(
        (folder / name).stat().st_size // (2 * columns) if (folder / name).is_file() else 0
        for name, columns in _files(origin).items()
    )
    return records[np.cumsum(records["length"], dtype=np.int64) <= whole]


def _files(origin: Origin) -> dict[str, int]:
    """{file: columns}."""
    files = {_FEATURES: origin.columns}
    return files | {_FINAL: origin.hidden_size} if origin.final else files


def _plain(origin: Origin) -> dict[str, Any]:
    return dataclasses.asdict(origin) | {"taps": list(origin.taps)}


# --- writing ----------------------------------------------------------------------------------------------


def run(settings: Settings, screen: Screen) -> int:
    """The command `features`."""
    target = build.load_target(settings)
    setup = build.make_setup(settings, target, build.draft_config(settings, target))
    training, held_out, _ = corpus.load(settings, target.tokenizer)
    folder = settings.within(settings.features.store)
    began = time.monotonic()
    plan = Plan(folder, target, setup, corpus.join([training, held_out]), settings.data)
    screen.clear()
    print(plan.announcement(), flush=True)
    plan.write()
    took = time.monotonic() - began
    print(f"wrote {plan.positions:,} positions in {took:.0f} s ({plan.positions / took:,.0f}/s) to {folder}")
    print(
        "next: python -m train fit, with the same flags and --features.source offline"
        + (
            f" --features.store {settings.features.store}"
            if settings.features.store != Path("features")
            else ""
        )
    )
    return 0


class Plan:
    """The states that a folder lacks of these conversations. Making one writes nothing.

    positions: to write. needed, free: bytes. Raises ConfigError when the folder holds those of another
    origin, and when the disk is too small.
    """

    def __init__(self, folder: Path, target: pair.Target, setup: Setup, of: Corpus, data: Data):
        there = _stored(folder, origin(target, setup))
        self._origin = there or origin(target, setup)
        # a store that has the last states gets them for new conversations too
        self._setup = dataclasses.replace(setup, soft=1.0) if self._origin.final else setup
        self._folder, self._target, self._of = folder, target, of
        self._keys = keys(of)
        self._done = _records(folder, self._origin)
        have = {record["key"].tobytes() for record in self._done}
        lacking = {key: i for i, key in enumerate(self._keys) if key not in have}
        rows = np.array(sorted(lacking.values()), np.int64)
        # buckets of all conversations, so that a continued command runs the programs of the first
        self._buckets = [
            (bucket, np.intersect1d(bucket.members, rows)) for bucket in widths.buckets(of.length, data)
        ]
        self.conversations, self.positions = len(rows), int(of.length[rows].sum())
        self.needed = self.positions * self._origin.position_bytes
        self.free = shutil.disk_usage(
            next(p for p in (folder, *folder.absolute().parents) if p.exists())
        ).free
        if self.needed > self.free:
            raise ConfigError(
                f"{folder}: features take {_gib(self.needed)}, but {_gib(self.free)} are free: set "
                "features.store to a larger disk, or features.source to online"
            )

    def announcement(self) -> str:
        what = f"{len(self._origin.taps)} taps" + (" and the last states" if self._origin.final else "")
        return (
            f"features of {self.conversations:,} conversations ({len(self._done):,} are there already): "
            f"{self.positions:,} positions x {what} in bfloat16, {_gib(self.needed)}; "
            f"{_gib(self.free)} are free at {self._folder}"
        )

    def write(self) -> None:
        """All of them, width by width."""
        self._begin()
        progress = Progress("features", self.positions, "positions")
        written = 0
        waiting: tuple[np.ndarray, Any] | None = None
        for rows, states in self._states():
            # the device computes these while those before are written
            if waiting is not None:
                written += self._append(*waiting)
                if progress.due():
                    progress.show(written)
            waiting = rows, states
        if waiting is not None:
            self._append(*waiting)

    def _begin(self) -> None:
        """An empty store, or what is complete of one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._folder / _INDEX) as file:
            file.write(json.dumps({"version": _VERSION, "origin": _plain(self._origin)}, indent=1).encode())
        positions = int(self._done["length"].sum(dtype=np.int64))
        sizes = {name: 2 * columns * positions for name, columns in _files(self._origin).items()}
        for name, size in {_ROWS: self._done.nbytes, **sizes}.items():
            with (self._folder / name).open("ab") as file:
                file.truncate(size)

    def _states(self) -> Iterator[tuple[np.ndarray, Any]]:
        for bucket, members in self._buckets:
            for first in range(0, len(members), bucket.rows):
                rows = members[first : first + bucket.rows]
                whole = np.pad(rows, (0, bucket.rows - len(rows)), mode="edge")
                batch = self._of.batch(whole, bucket.width)
                yield rows, stored_states(self._setup, self._target.params, batch)

    def _append(self, rows: np.ndarray, states: Any) -> int:
        lengths = self._of.length[rows]
        for name, of in zip(_files(self._origin), states, strict=False):
            found = np.asarray(of).view(np.uint16)
            _add(self._folder / name, [found[i, :length].data for i, length in enumerate(lengths)])
        records = np.empty(len(rows), _RECORD)
        records["length"] = lengths
        records["key"] = np.frombuffer(b"".join(self._keys[row] for row in rows), "V16")
        _add(self._folder / _ROWS, [records.tobytes()])
        return int(lengths.sum())


def _add(path: Path, parts: list[memoryview] | list[bytes]) -> None:
    """On the disk when this returns: what a record promises must be there before it."""
    with path.open("ab") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _gib(size: int) -> str:
    return f"{size / _GIB:.3g} GiB"
