"""Times of block sizes: measured once per device and pair, kept, and what the adaptive policy decides by."""

from __future__ import annotations

import dataclasses
import json

import folders
import pytest

from dflash_jax.policy import Adaptive, Fixed
from dflash_jax.state import Options
from dflash_jax.tree import TreeShape
from infer import costs
from infer.session import Session

SIZES = (1, 2, folders.BLOCK)
CHAIN = Options(Adaptive(SIZES, SIZES))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_fixed_policies_need_no_times(session: Session, cache) -> None:
    options = Options(Fixed(3))
    assert costs.with_costs(session.pair, options, 1) is options
    assert not list(cache.rglob("*"))


def test_times_are_measured_once(session: Session, cache, monkeypatch) -> None:
    first = costs.with_costs(session.pair, CHAIN, 1).policy
    assert isinstance(first, Adaptive)
    assert first.draft_ms[0] == 0 and min(*first.draft_ms[1:], *first.verify_ms) > 0
    monkeypatch.setattr(costs, "measure", None)
    assert costs.with_costs(session.pair, CHAIN, 1).policy == first
    with pytest.raises(TypeError):  # another batch, and so other times
        costs.with_costs(session.pair, CHAIN, 2)


def test_trees_have_times_of_their_own(session: Session, cache) -> None:
    tree = Options(Adaptive((1, folders.BLOCK), (1, 4, 8)), tree=TreeShape(7))
    policy = costs.with_costs(session.pair, tree, 1).policy
    assert isinstance(policy, Adaptive) and len(policy.verify_ms) == 3


def test_what_changes_the_times_changes_the_file(session: Session) -> None:
    def key(options: Options = CHAIN, batch: int = 1, **pair: object) -> str:
        assert isinstance(options.policy, Adaptive)
        return costs.key(dataclasses.replace(session.pair, **pair), options.policy, options, batch)

    others = [
        key(batch=2),
        key(dtype="bfloat16"),
        key(dataclasses.replace(CHAIN, rollback="states")),
        key(dataclasses.replace(CHAIN, tree=TreeShape(7))),
        key(dataclasses.replace(CHAIN, tree=TreeShape(7, temperature=2.0))),
        key(Options(Adaptive(SIZES, SIZES[1:]))),
    ]
    assert key() == key() and len({key(), *others}) == 1 + len(others)
    timed = Options(dataclasses.replace(CHAIN.policy, draft_ms=(0.0, 1.0, 2.0)))
    assert key(timed) == key(), "what was measured is no reason to measure again"


def test_replay_chooses_as_a_tape_does(session: Session, cache, monkeypatch) -> None:
    """Replay is no mode of the compiled loop, which is what is timed."""
    times = {"draft_ms": [0.0, 1.0, 2.0], "verify_ms": [3.0, 4.0, 5.0]}
    asked = []
    monkeypatch.setattr(costs, "measure", lambda pair, policy, options, batch: asked.append(options) or times)
    timed = costs.with_costs(session.pair, dataclasses.replace(CHAIN, rollback="replay"), 1)
    assert [options.rollback for options in asked] == ["tape"]
    assert timed.rollback == "replay" and timed.policy == costs.with_costs(session.pair, CHAIN, 1).policy


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"draft_ms": [1], "verify_ms": [1]}', '{"draft_ms": "abc", "verify_ms": []}']
)
def test_a_damaged_file_is_measured_again(session: Session, cache, monkeypatch, damage: str) -> None:
    times = {"draft_ms": [0.0, 1.0, 2.0], "verify_ms": [3.0, 4.0, 5.0]}
    monkeypatch.setattr(costs, "measure", lambda *args: times)
    costs.with_costs(session.pair, CHAIN, 1)
    (file,) = (cache / "costs").iterdir()
    file.write_text(damage)
    policy = costs.with_costs(session.pair, CHAIN, 1).policy
    assert policy == dataclasses.replace(CHAIN.policy, draft_ms=(0.0, 1.0, 2.0), verify_ms=(3.0, 4.0, 5.0))
    assert json.loads(file.read_text()) == times
