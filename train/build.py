"""From settings and a loaded target to the objects of a run."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from dflash_jax import drafts, pair
from dflash_jax.config import ConfigError, DraftConfig
from dflash_jax.drafts import DFlash
from dflash_jax.tokenizer import ByteTokenizer
from dflash_jax.weights import hf
from train import initialise
from train.loss import default_gamma
from train.settings import Settings
from train.step import Setup

# What tokenizers call a token that may stand for "unknown yet", best first. No answer of a chat model holds
# one, so its embedding row is free to mean "mask".
_MASKS = (
    "<|mask|>",
    "<mask>",
    "[MASK]",
    "<|fim_pad|>",
    "<|reserved_special_token_0|>",
    "<repo_name>",
    "<pad>",
)


def load_target(settings: Settings) -> pair.Target:
    """The target alone, in the dtype of the run."""
    return pair.load(settings.target, pair.NO_DRAFT, dtype=settings.run.target_dtype).target


def draft_config(settings: Settings, target: pair.Target) -> DraftConfig:
    """Raises ConfigError where the settings do not fit the target."""
    model = settings.model
    return pair.draft_shape(
        target.config,
        num_layers=model.layers,
        block_size=model.block_size,
        mask_token_id=mask_token(settings, target),
        taps=model.taps,
        window=model.window,
    )


def mask_token(settings: Settings, target: pair.Target) -> int:
    given = settings.model.mask_token_id
    if given is not None:
        return given
    if isinstance(target.tokenizer, ByteTokenizer):
        return target.config.vocab_size - 1
    for word in _MASKS:
        ids = target.tokenizer.encode(word)
        if len(ids) == 1 and ids[0] not in target.stop_ids:
            return ids[0]
    raise ConfigError(
        f"{target.source}: no token is known to be free to mean 'mask': set model.mask_token_id to one that "
        "no text holds"
    )


def make_setup(settings: Settings, target: pair.Target, config: DraftConfig) -> Setup:
    o, opt = settings.objective, settings.optimizer
    size = config.block_size
    if o.candidates > config.vocab_size:
        raise ConfigError(
            f"objective.candidates is {o.candidates}: the vocabulary has {config.vocab_size} tokens"
        )
    return Setup(
        target=target.module,
        draft=DFlash(config),
        anchors=o.anchors,
        gamma=default_gamma(size) if o.gamma is None else o.gamma,
        loss=o.loss,
        fixed=o.placement == "fixed",
        candidates=o.candidates,
        full_every=o.full_every,
        chunk=o.chunk,
        dtype=settings.run.dtype,
        soft=o.soft,
        soft_temperature=o.soft_temperature,
        clip=opt.clip,
        beta1=opt.beta1,
        beta2=opt.beta2,
        decay=opt.weight_decay,
        remat=settings.run.remat,
    )


def start_params(
    settings: Settings, target: pair.Target, config: DraftConfig, tokens: Int[Array, "B S"]
) -> dict[str, Any]:
    """The draft's first weights (float32): of run.init_from, of the target's last layers, or random.
    tokens: a little ordinary text of the target."""
    if settings.run.init_from is not None:
        folder = settings.run.init_from
        found = hf.draft_config(folder)
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            if getattr(found, name) != getattr(config, name):
                raise ConfigError(
                    f"run.init_from: {folder} has {name} {getattr(found, name)}, the run {getattr(config, name)}"
                )
        if len(found.taps) != len(config.taps):
            raise ConfigError(
                f"run.init_from: {folder} has {len(found.taps)} taps, the run {len(config.taps)}"
            )
        return hf.load_draft(folder, found, drafts.abstract_params(config), np.dtype(np.float32))
    if settings.model.start == "target":
        return initialise.from_target(target.module, target.params, config, tokens)
    return jax.tree.map(np.asarray, drafts.init_params(config, jax.random.key(settings.run.seed)))
