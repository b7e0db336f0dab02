"""The benchmark of hybrid targets on tiny shapes: what it says about bytes is so, and its arms do the same."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
import test_full_size

from dflash_jax import targets, testing
from dflash_jax.cache import trail_bytes
from dflash_jax.config import FULL, RECURRENT
from infer import rollback

TINY = testing.target_config("qwen3_5", layer_types=(RECURRENT, FULL), num_layers=2)
MIB = 2**20


def test_the_layer_is_qwens() -> None:
    """One recurrent layer of the published config has the parameters of the benchmark's."""
    published = targets.abstract_params(test_full_size.config_of("Qwen3.5-27B"))["layers_0"]
    assert jax.tree.map(lambda x: x.shape, targets.abstract_params(rollback.QWEN35_27B)["layers_0"]) == (
        jax.tree.map(lambda x: x.shape, published)
    )


@pytest.mark.parametrize("block", [rollback.chain_of(4), rollback.tree_of(8)], ids=["chain", "tree"])
def test_strategies_commit_one_state_and_count_their_bytes(block) -> None:
    params = rollback.weights(targets.abstract_params(TINY)["layers_0"])
    figures = rollback.strategies(TINY, params, block, accepted=3, repeats=1)
    attention = 2 * block.size * TINY.num_kv_heads * TINY.head_dim * 4
    for name in ("tape", "states"):
        assert figures[name]["difference"] < 1e-5
        assert figures[name]["trail_mib"] * MIB == trail_bytes(TINY, 1, block.size, 4, name) - attention
    assert figures["replay"]["trail_mib"] == 0


def test_a_tree_has_two_branches() -> None:
    block = rollback.tree_of(8)
    assert block.parents.tolist() == [[-1, 0, 1, 2, 0, 1, 2, 3]]
    assert block.depth.tolist() == [[0, 1, 2, 3, 1, 2, 3, 4]]


def test_the_layer_order_keeps_what_the_formula_says() -> None:
    figures = rollback.prefill(TINY, 256, 64, repeats=1)
    by_order = {order: (values["alive_mib"], values["expected_mib"]) for order, values in figures.items()}
    # both layers are tapped, the second is the stream
    residuals = 256 * 2 * TINY.hidden_size * 4 / MIB
    assert by_order["layers"][1] - by_order["tokens"][1] == pytest.approx(residuals)
    for alive, expected in by_order.values():
        assert alive == pytest.approx(expected, rel=0.02)


def test_the_program_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollback, "keep_compiled", lambda: None)
    monkeypatch.setattr(rollback, "QWEN35_27B", TINY)
    monkeypatch.setattr(rollback, "SMALL", TINY)
    out = tmp_path / "rollback.json"
    sizes = ["--chain", "3", "--accepted", "2", "--rule-rows", "3", "--prompt-tokens", "20"]
    assert rollback.run([*sizes, "--chunk-sizes", "8", "--repeats", "1", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert {"layer, chain of 3", "layer, tree of 6", "rule, 3 rows", "prefill, chunks of 8"} < set(written)
    assert set(written["rule, 3 rows"]) == {"sequential", "tape", "states"}
    printed = capsys.readouterr()
    assert "layer, tree of 6" in printed.out and "GiB of weights" in printed.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--accepted", "17"], "--accepted 17: a chain of 16"),
        (["--repeats", "0"], "must be positive"),
        (["--chunk-sizes", "0"], "must be positive"),
    ],
)
def test_refusals(flags: list[str], message: str) -> None:
    with pytest.raises(rollback.ConfigError, match=message):
        rollback.run(flags)
