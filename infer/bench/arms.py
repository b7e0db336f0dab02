"""The arms of a comparison: ways to decode the same prompt, with one set of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_jax.config import ConfigError
from dflash_jax.pair import Pair
from dflash_jax.policy import Fixed
from dflash_jax.state import AUTOREGRESSIVE, Options
from infer.costs import with_costs
from infer.peers import DFLASH
from infer.peers import NAMES as PEERS
from infer.settings import Settings, plan

AR = "ar"
FIXED, ADAPTIVE = ("chain", "tree"), ("adaptive", "adaptive-tree")
KINDS = (AR, *FIXED, *ADAPTIVE, *PEERS)


@dataclass(frozen=True)
class Arm:
    """name: "ar", "chain-6", "tree-6-16", "adaptive-6", "adaptive-tree-6-16", "dflash-6", "transformers": kind, block
    size (anchor included) and, of a tree, budget (anchor excluded). options: of a peer its block size alone counts."""

    name: str
    kind: str
    options: Options

    @property
    def block_size(self) -> int:
        return self.options.largest

    @property
    def is_peer(self) -> bool:
        """Another implementation (infer/peers.py)."""
        return self.kind in PEERS

    @property
    def budget(self) -> int | None:
        return self.options.tree.budget if self.options.tree else None


def arms(
    pair: Pair, kinds: Sequence[str], block_sizes: Sequence[int], budgets: Sequence[int], settings: Settings
) -> list[Arm]:
    """Autoregressive first (every other arm is compared with it), then each kind at every block size, trees
    at every budget too, and other implementations. Adaptive arms choose among sizes themselves: they get the
    largest. No block_sizes: the pair's. The first adaptive arm on a device measures what sizes cost there
    (infer/costs.py).

    ConfigError for an unknown kind, a repeated value, or what the draft cannot do."""
    if not kinds:
        raise ConfigError(f"--compare is empty: name some of {', '.join(KINDS)}")
    trees = any(kind.endswith("tree") for kind in kinds)
    if not trees and (settings.tree_chain_seed or settings.tree_temperature != 1.0):
        raise ConfigError("--tree-chain-seed and --tree-temperature are of trees: --compare names none")
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"--compare names '{kind}': it is one of {', '.join(KINDS)}")
    for name, values in (("compare", kinds), ("block-sizes", block_sizes), ("tree-budgets", budgets)):
        if len(set(values)) < len(values):
            raise ConfigError(f"--{name} names one of its values twice: each is measured once")
    wanted = [kind for kind in KINDS if kind in kinds and kind != AR]
    found = [Arm(AR, AR, AUTOREGRESSIVE)]
    found += [Arm(kind, kind, AUTOREGRESSIVE) for kind in wanted if kind in PEERS and kind != DFLASH]
    if settings.temperature and set(wanted) & set(PEERS):
        raise ConfigError(
            "other implementations have other random numbers: they are compared at temperature 0"
        )
    wanted = [kind for kind in wanted if kind not in PEERS or kind == DFLASH]
    if not wanted:
        return found
    if pair.draft is None:
        raise ConfigError(
            f"comparing {', '.join(wanted)} needs a draft, and there is none: give one with --draft"
        )
    if not budgets and trees:
        raise ConfigError("--tree-budgets is empty: a tree needs a budget")
    chain = replace(settings, mode="chain", tree_chain_seed=False, tree_temperature=1.0)
    sizes = sorted(block_sizes) or [plan(pair, chain).block_size]
    for kind in wanted:
        if kind == DFLASH:
            found += [Arm(f"{kind}-{size}", kind, Options(Fixed(size))) for size in sizes]
            continue
        base = replace(chain, policy="adaptive" if kind in ADAPTIVE else "fixed")
        shapes = [(f"{kind}-{size}", replace(base, block_size=size)) for size in sizes]
        if kind.endswith("tree"):
            shapes = [
                (f"{name}-{budget}", _tree(one, settings, budget))
                for name, one in shapes
                for budget in sorted(budgets)
            ]
        for name, one in shapes[-1:] if kind in ADAPTIVE else shapes:
            found.append(Arm(name, kind, with_costs(pair, plan(pair, one).options, 1)))
    return found


def _tree(chain: Settings, asked: Settings, budget: int) -> Settings:
    return replace(
        chain,
        mode="tree",
        tree_budget=budget,
        tree_chain_seed=asked.tree_chain_seed,
        tree_temperature=asked.tree_temperature,
    )
