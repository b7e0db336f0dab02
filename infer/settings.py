"""What a user asks of a generation, checked against the pair and turned into the decoder's terms."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from dflash_jax.cache import Ring
from dflash_jax.config import ConfigError, check_block_size
from dflash_jax.pair import Pair
from dflash_jax.policy import Adaptive, Fixed, Policy
from dflash_jax.sampling import sampling
from dflash_jax.state import Options
from dflash_jax.streaming import StopStrings
from dflash_jax.tree import TreeShape

_ADAPTIVE_SIZES = (2, 4, 8, 16, 32)
# The fastest of 8, 16, 22, 32 and 64 on one CPU core (LOG.md); where rows are cheap, more pay.
_TREE_BUDGET = 8


@dataclass(frozen=True)
class Settings:
    """One request. The names are the command line's flags.

    max_new_tokens: budget, the prefill's token included. stop: texts that end the output, not part of it.
    block_size: anchor included; None is the pair's. policy, mode, tree_budget None are the pair's; tree_*: see
    dflash_jax.tree.TreeShape. Raises ConfigError for values that no pair can use.
    temperature 0 is greedy; seed: row b of a batch uses seed + b. draft_window: see decode.prefill.
    verify, bonus, rollback "replay": debugging modes of the stepwise loop. proposal, rollback: see
    dflash_jax.state.Options. prefill: the order of decode.prefill.
    """

    max_new_tokens: int = 128
    block_size: int | None = None
    mode: Literal["chain", "tree"] | None = None
    tree_budget: int | None = None
    tree_chain_seed: bool = False
    tree_temperature: float = 1.0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    policy: Literal["fixed", "adaptive"] | None = None
    chunk_size: int = 512
    verify: Literal["batched", "sequential"] = "batched"
    bonus: Literal["implicit", "explicit"] = "implicit"
    rollback: Literal["tape", "states", "replay"] = "tape"
    prefill: Literal["tokens", "layers"] = "tokens"
    proposal: Literal["argmax", "sample"] = "argmax"
    draft_window: int | None = None
    logprobs: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}: it must be 0 or more")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed is {self.seed}: it must be 0 to {2**31 - 1}")
        if self.chunk_size < 1:
            raise ConfigError(f"chunk_size is {self.chunk_size}: it must be positive")
        if self.block_size is not None and self.block_size < 2:
            raise ConfigError(
                f"block_size is {self.block_size}: a block is at least the anchor and a candidate"
            )
        self.check_with(self.mode or ("tree" if self.tree_budget else None), self.policy)
        if self.mode == "chain":
            for name, value in self._of_trees():
                if value:
                    raise ConfigError(f"{name} is for trees: leave it out, or --mode tree")
        budget = 1 if self.tree_budget is None else self.tree_budget
        TreeShape(budget, self.tree_chain_seed, self.tree_temperature)
        if self.proposal == "sample" and self.temperature == 0:
            raise ConfigError("proposal 'sample' needs a temperature above 0: greedy decoding has one answer")
        sampling(self.temperature, self.top_p, self.top_k)
        if self.temperature == 0 and (self.top_p < 1 or self.top_k):
            raise ConfigError(
                "top_p and top_k need a temperature above 0: greedy decoding takes the best token"
            )
        if self.draft_window is not None:
            Ring.of(self.draft_window, 1)
        StopStrings(self.stop)

    def check_with(self, mode: str | None, policy: str | None) -> None:
        """ConfigError for what does not go with this mode and policy: those given here, or the pair's."""
        if mode == "tree" and self.proposal == "sample":
            raise ConfigError(
                "proposal 'sample' is for chains: min(1, p/q) over a tree of the best is biased"
            )
        if policy == "adaptive" and self.proposal == "sample":
            raise ConfigError(
                "proposal 'sample' needs a fixed policy: leaving candidates out by what they are is biased"
            )
        if mode == "tree" and self.verify == "sequential":
            raise ConfigError("verify 'sequential' goes along a chain: it cannot verify a tree")

    def without_draft(self) -> Settings:
        """What of it holds for autoregressive decoding."""
        own = (
            "block_size",
            "mode",
            "tree_budget",
            "tree_chain_seed",
            "tree_temperature",
            "policy",
            "proposal",
            "draft_window",
        )
        return dataclasses.replace(self, **{name: getattr(Settings, name) for name in own})

    def _of_trees(self) -> tuple[tuple[str, object], ...]:
        return (
            ("tree_budget", self.tree_budget),
            ("tree_chain_seed", self.tree_chain_seed),
            ("tree_temperature", self.tree_temperature != 1.0),
        )


@dataclass(frozen=True)
class Plan:
    """How a request is decoded. mode: "chain", "tree" or, without a draft, "ar": blocks of the anchor
    alone.

    stepwise: why the compiled loop cannot serve it, empty if it can.
    """

    options: Options
    mode: str
    stepwise: tuple[str, ...]

    @property
    def block_size(self) -> int:
        return self.options.largest


def plan(pair: Pair, settings: Settings, watched: tuple[str, ...] = ()) -> Plan:
    """watched: what looks at every round (streaming, a trace). ConfigError for values that cannot be
    used, and for those that would silently do nothing."""
    options = Options(Fixed(1), settings.proposal, settings.logprobs, settings.rollback)
    if pair.draft is None:
        _refuse_without_draft(settings)
        mode = "ar"
    else:
        mode = settings.mode or ("tree" if settings.tree_budget else pair.generation.mode)
        if mode != "tree" and any(value for _, value in settings._of_trees()):
            raise ConfigError("tree_chain_seed and tree_temperature are for trees: add --mode tree")
        settings.check_with(mode, settings.policy or pair.generation.policy)
        tree = _tree(pair, settings) if mode == "tree" else None
        options = dataclasses.replace(options, policy=_policy(pair, settings, tree), tree=tree)
    reasons = [f"{name} {value}" for name, value in _debugging(settings) if value]
    reasons += ["stop strings"] * bool(settings.stop)
    reasons += ["a draft on another device"] * pair.models.apart
    reasons += ["embeddings on the host"] * (pair.models.table is not None)
    return Plan(options, mode, (*reasons, *watched))


def _tree(pair: Pair, settings: Settings) -> TreeShape:
    budget = settings.tree_budget or pair.generation.tree_budget or _TREE_BUDGET
    return TreeShape(budget, settings.tree_chain_seed, settings.tree_temperature)


def _policy(pair: Pair, settings: Settings, tree: TreeShape | None) -> Policy:
    assert pair.draft is not None
    size = settings.block_size or pair.generation.block_size or pair.draft.config.block_size
    check_block_size(pair.draft.config, size)
    if tree is not None:
        tree.check_block(size)
    nodes = size if tree is None else tree.budget + 1
    if (settings.policy or pair.generation.policy) == "fixed":
        return Fixed(size, nodes)
    rows = (1, *(n for n in _ADAPTIVE_SIZES if n < nodes), nodes)
    if tree is not None:
        return Adaptive((1, size), rows)
    return Adaptive((1, *(n for n in _ADAPTIVE_SIZES if n < size), size), rows)


def _debugging(settings: Settings) -> tuple[tuple[str, str], ...]:
    return (
        ("verify", settings.verify if settings.verify != "batched" else ""),
        ("bonus", settings.bonus if settings.bonus != "implicit" else ""),
        ("rollback", settings.rollback if settings.rollback == "replay" else ""),
    )


def _refuse_without_draft(settings: Settings) -> None:
    given = [
        ("block_size", settings.block_size),
        ("mode", settings.mode),
        *settings._of_trees(),
        ("policy", settings.policy if settings.policy == "adaptive" else None),
        ("proposal", settings.proposal if settings.proposal != "argmax" else None),
        ("draft_window", settings.draft_window),
        *_debugging(settings),
    ]
    for name, value in given:
        if value:
            raise ConfigError(f"{name} {value} needs a draft, and there is none: give one with --draft")
