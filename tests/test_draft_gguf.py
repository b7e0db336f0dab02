"""GGUF drafts: four families read as one model, two written, doubtful files said to be so, damaged files one
sentence."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import draft_files
import gguf as gguf_py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import writers
from draft_files import EXPECTED, FAMILIES, TAPS, TENSORS, WINDOW
from writers import BFLOAT16, assert_trees_equal

from dflash_jax import drafts, testing
from dflash_jax.cache import draft_cache
from dflash_jax.config import (
    FULL,
    SLIDING,
    ConfigError,
    DraftConfig,
    Overrides,
    RopeConfig,
    Training,
    luce_taps,
)
from dflash_jax.weights import draft_gguf, draft_schema, gguf, hf
from dflash_jax.weights.draft_schema import LUCE, UPSTREAM

TARGET = testing.target_config("qwen3", hidden_size=64, num_layers=7, vocab_size=80, rope=RopeConfig(1e6))
WRITTEN = {"upstream": UPSTREAM, "luce": LUCE}


def hf_draft(folder: Path, **changes: Any) -> Path:
    config = writers.draft_json(dflash_config={"target_layer_ids": list(TAPS)})
    return writers.hf_folder(folder, writers.changed(config, changes), TENSORS)


def read(path: Path) -> DraftConfig:
    """Without the warnings of Luce's taps, which other tests look at."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*names no target layers", UserWarning)
        return draft_gguf.draft_config(path, TARGET)


# --- four families are one model ----------------------------------------------------------------------


def test_every_family_reads_to_the_same_model(tmp_path: Path) -> None:
    folder = hf_draft(tmp_path / "hf")
    config = hf.draft_config(folder)

    @jax.jit
    def logits(params: dict) -> jax.Array:
        cache = draft_cache(config, 1, 8, jnp.float32)
        features = jnp.linspace(-1, 1, 3 * 192, dtype=jnp.float32).reshape(1, 3, 192)
        block = jnp.linspace(-1, 1, 4 * 64, dtype=jnp.float32).reshape(1, 4, 64)
        return drafts.DFlash(config).apply({"params": params}, cache, features, block)

    expected = logits(hf.load_draft(folder, config, EXPECTED, np.float32))
    assert np.isfinite(expected).all()
    for family in FAMILIES:
        path = draft_files.write(tmp_path / f"{family}.gguf", family)
        assert gguf.is_draft(path)
        assert read(path) == config, family
        loaded = draft_gguf.load_draft(path, config, drafts.abstract_params(config), np.float32)
        assert_trees_equal(loaded, EXPECTED)
        np.testing.assert_array_equal(logits(loaded), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", WRITTEN)
def test_what_is_written_reads_back_here_and_by_others(tmp_path: Path, family: str, kind: str) -> None:
    config = hf.draft_config(hf_draft(tmp_path / "hf"))
    path = tmp_path / "draft.gguf"
    size = draft_gguf.save_draft(path, config, EXPECTED, kind, WRITTEN[family])
    assert size == path.stat().st_size and [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []

    assert draft_gguf.draft_config(path) == config  # it needs no target: it says all of it
    stored = {}
    for name, value in TENSORS.items():
        quantisation = gguf_py.GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        blocks = gguf_py.quants.quantize(value, quantisation)
        stored[name] = gguf_py.quants.dequantize(blocks, quantisation).reshape(value.shape)
    assert_trees_equal(
        draft_gguf.load_draft(path, config, EXPECTED, np.float32), writers.expected_tree(stored)
    )

    theirs = {tensor.name: tensor for tensor in gguf_py.GGUFReader(path).tensors}
    assert (
        set(theirs) == {draft_files.name_of(family, name) for name in TENSORS} and len(theirs) == 3 + 11 * 2
    )
    for name, value in stored.items():
        tensor = theirs[draft_files.name_of(family, name)]
        assert tensor.tensor_type.name == (kind if value.ndim == 2 else "F32")
        decoded = gguf_py.quants.dequantize(tensor.data, tensor.tensor_type).reshape(value.shape)
        np.testing.assert_array_equal(decoded, value)

    keys, tensors = draft_files.parse(path)
    for key, value in draft_files.metadata(family).items():
        assert keys[key] == pytest.approx(value), key
    if kind == "F32":
        for name, value in TENSORS.items():
            np.testing.assert_array_equal(tensors[draft_files.name_of(family, name)][1], value)


SPECIAL = {
    "plain": {},
    "sliding": {
        "layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 8,
    },
    "both ways": {
        "layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 8, "is_causal": False,
    },
    "causal": {"is_causal": True},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.25,
        }
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "trained": {
        "dflash_config": {
            "training": {"loss_decay": 3.0, "num_anchors": 96, "target_name": "a target", "target_hash": "ab" * 32}
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("family", WRITTEN)
def test_there_and_back_is_the_same_folder(tmp_path: Path, family: str, changes: dict) -> None:
    """F32 and BF16: config.json and model.safetensors byte by byte as when we write them from the source."""
    config = hf.draft_config(hf_draft(tmp_path / "source", **changes))
    for kind, dtype in (("F32", np.dtype(np.float32)), ("BF16", BFLOAT16)):
        params = jax.tree.map(lambda value, dtype=dtype: value.astype(dtype), EXPECTED)
        hf.save_draft(tmp_path / "before", config, params, dtype)
        draft_gguf.save_draft(tmp_path / "draft.gguf", config, params, kind, WRITTEN[family])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*sliding layers see both ways", UserWarning)
            found = draft_gguf.draft_config(tmp_path / "draft.gguf")
        assert found == config
        loaded = draft_gguf.load_draft(tmp_path / "draft.gguf", found, EXPECTED, dtype)
        hf.save_draft(tmp_path / "after", found, loaded, dtype)
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()


def test_scales_are_llama_cpp_keys(tmp_path: Path) -> None:
    changes = {"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
    config = hf.draft_config(hf_draft(tmp_path / "hf", **changes))
    draft_gguf.save_draft(tmp_path / "draft.gguf", config, EXPECTED, "F32")
    assert draft_gguf.draft_config(tmp_path / "draft.gguf") == config
    with pytest.raises(ConfigError, match=r"Luce files have no key for embedding_scale, which is 2\.5"):
        draft_gguf.save_draft(tmp_path / "luce.gguf", config, EXPECTED, "F32", LUCE)
    assert not (tmp_path / "luce.gguf").exists()


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"layer_types": (SLIDING, FULL)}, "F32", "sliding layers without a window have no form"),
        ({"causal": (True, False)}, "F32", "one flag for all"),
        ({"rope": RopeConfig(1e4, "llama3", 8.0, 512)}, "F32", "llama3 rope scaling has no form"),
        ({"rope": RopeConfig(1e4, "yarn", 8.0, 512, truncate=False)}, "F32", "truncate false has no form"),
        ({}, "Q4_K", "type 'Q4_K' is not written: one of F32, F16, BF16, Q8_0, Q4_0"),
        ({"num_layers": 3, "layer_types": (), "causal": ()}, "F32", r"have layers \[0, 1\], the config 3"),
    ],
)
def test_what_gguf_cannot_say_is_not_written(tmp_path: Path, changes: dict, kind: str, says: str) -> None:
    config = dataclasses.replace(hf.draft_config(hf_draft(tmp_path / "hf")), **changes)
    with pytest.raises(ConfigError, match=says):
        draft_gguf.save_draft(tmp_path / "draft.gguf", config, EXPECTED, kind)
    assert not (tmp_path / "draft.gguf").exists()


def test_values_that_do_not_fit_a_type_are_not_written(tmp_path: Path) -> None:
    """A float16 would become infinite; Q8_0 has blocks of 32. What was there before stays."""
    config = hf.draft_config(hf_draft(tmp_path / "hf"))
    path = tmp_path / "draft.gguf"
    draft_gguf.save_draft(path, config, EXPECTED, "F16")
    before = path.read_bytes()
    large = jax.tree.map(np.copy, EXPECTED)
    large["layers_1"]["mlp"]["up_proj"]["weight"][3, 3] = 1e5
    with pytest.raises(ConfigError, match=r"blk\.1\.ffn_up\.weight holds 100000\.0, which F16 cannot"):
        draft_gguf.save_draft(path, config, large, "F16")
    large["layers_1"]["mlp"]["up_proj"]["weight"][3, 3] = np.nan
    with pytest.raises(ConfigError, match="holds NaN or infinity"):
        draft_gguf.save_draft(path, config, large, "F32")
    narrow = dataclasses.replace(config, intermediate_size=40)
    odd = jax.tree.map(np.copy, EXPECTED)
    odd["layers_0"]["mlp"]["down_proj"]["weight"] = np.ones((64, 40), np.float32)
    with pytest.raises(
        ConfigError, match=r"ffn_down\.weight has rows of 40 values, Q8_0 needs a multiple of 32"
    ):
        draft_gguf.save_draft(path, narrow, odd, "Q8_0")
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft.gguf", "hf"]


# --- what files leave out, and get wrong ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "count", "taps"),
    [(64, 5, (1, 16, 31, 46, 61)), (66, 5, (1, 17, 33, 49, 65)), (7, 3, TAPS), (9, 1, (1,))],
)
def test_luce_leaves_the_taps_to_the_reader(tmp_path: Path, depth: int, count: int, taps: tuple) -> None:
    assert luce_taps(depth, count) == taps
    path = draft_files.write(tmp_path / "d.gguf", "luce", keys={"A.dflash.n_target_layers": count})
    with pytest.warns(UserWarning, match="names no target layers: taking .* Luce's rule"):
        config = draft_gguf.draft_config(path, dataclasses.replace(TARGET, num_layers=depth, layer_types=()))
    assert config.taps == taps
    path = draft_files.write(tmp_path / "new.gguf", "luce", keys={"A.dflash.target_layer_ids": [0, 2, 6]})
    assert draft_gguf.draft_config(path, TARGET).taps == (0, 2, 6)


def test_before_and_after_the_merge_are_told_apart_by_names(tmp_path: Path) -> None:
    for family, stored in (("upstream", [1, 3, 7]), ("pre-merge", [0, 2, 6])):
        path = draft_files.write(tmp_path / f"{family}.gguf", family, keys={"A.target_layers": stored})
        assert draft_gguf.draft_config(path, TARGET).taps == (0, 2, 6)
    # the norm's name of the one with the mask's key of the other
    path = draft_files.write(tmp_path / "both.gguf", "upstream", keys={"A.mask_token_id": 3})
    with pytest.raises(ConfigError, match=r"names of files from before and after llama\.cpp's merge"):
        draft_gguf.draft_config(path, TARGET)


def test_a_target_supplies_what_is_missing(tmp_path: Path) -> None:
    path = draft_files.write(tmp_path / "d.gguf", "upstream")
    with pytest.raises(
        draft_gguf.NeedsTarget, match="does not say its target's depth and number of embedding"
    ):
        draft_gguf.draft_config(path)
    config = draft_gguf.draft_config(path, TARGET)
    assert (config.num_target_layers, config.vocab_size) == (writers.DEPTH, writers.VOCAB)
    said = {"A.vocab_size": 90, "dflash.training.num_target_layers": 9}
    path = draft_files.write(tmp_path / "e.gguf", "upstream", keys=said)
    config = draft_gguf.draft_config(path, TARGET)  # its own words, for check_pair to compare
    assert (config.num_target_layers, config.vocab_size) == (9, 90)
    shapes = draft_gguf.shape_config(draft_files.write(tmp_path / "f.gguf", "luce"))
    assert (shapes.hidden_size, shapes.num_layers, len(shapes.taps)) == (64, 2, 3)


def test_a_missing_block_size_is_16_for_llama_cpp_only(tmp_path: Path) -> None:
    path = draft_files.write(tmp_path / "d.gguf", "upstream", keys={"A.block_size": None})
    with pytest.warns(UserWarning, match="names no block size: taking 16, as llama.cpp does"):
        assert draft_gguf.draft_config(path, TARGET).block_size == 16
    path = draft_files.write(tmp_path / "e.gguf", "community", keys={"A.dflash.block_size": None})
    with pytest.raises(ConfigError, match=r"dflash-draft\.dflash\.block_size is missing"):
        draft_gguf.draft_config(path, TARGET)


def test_an_embedding_of_its_own_is_not_used_and_said_so(tmp_path: Path) -> None:
    extra = {"token_embd.weight": np.ones((90, 64), np.float32)}
    path = draft_files.write(tmp_path / "d.gguf", "upstream", extra=extra)
    with pytest.warns(UserWarning, match=r"token_embd\.weight is not read"):
        config = draft_gguf.draft_config(path, TARGET)
    assert config.vocab_size == 90
    assert_trees_equal(draft_gguf.load_draft(path, config, EXPECTED, np.float32), EXPECTED)


def test_luce_and_community_names_may_be_exchanged(tmp_path: Path) -> None:
    named = {draft_files.name_of("luce", name): value for name, value in TENSORS.items()}
    path = tmp_path / "d.gguf"
    path.write_bytes(draft_files.file_bytes(draft_files.metadata("community"), named))
    config = draft_gguf.draft_config(path, TARGET)
    assert_trees_equal(draft_gguf.load_draft(path, config, EXPECTED, np.float32), EXPECTED)
    twice = named | {"dflash_fc.weight": TENSORS["fc.weight"]}
    path.write_bytes(draft_files.file_bytes(draft_files.metadata("community"), twice))
    with pytest.raises(ConfigError, match=r"tensors dflash\.fc\.weight and dflash_fc\.weight are both"):
        draft_gguf.load_draft(path, config, EXPECTED, np.float32)


def test_the_base_of_luce_is_doubted_and_can_be_corrected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = draft_files.write(tmp_path / "d.gguf", "luce", keys={"A.dflash.target_layer_ids": list(TAPS)})
    target = dataclasses.replace(TARGET, rope=RopeConfig(1e7))
    with pytest.warns(UserWarning, match=r"rope base 1e\+06.* this target's is 1e\+07.*--rope-theta"):
        assert draft_gguf.draft_config(path, target).rope.theta == 1e6
    draft_gguf.draft_config(path, TARGET)  # the target has it too: no warning
    assert draft_gguf.draft_config(path, target, Overrides(rope_theta=1e7)).rope == RopeConfig(1e7)
    assert "rope base 1e+07 from --rope-theta" in caplog.text and "has 1000000.0" in caplog.text
    other = draft_files.write(tmp_path / "e.gguf", "upstream", keys={"A.rope.freq_base": None})
    with pytest.raises(ConfigError, match=r"dflash\.rope\.freq_base is missing"):
        draft_gguf.draft_config(other, TARGET)
    assert draft_gguf.draft_config(other, TARGET, Overrides(rope_theta=1e7)).rope == RopeConfig(1e7)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="--rope-theta"):
            Overrides(rope_theta=wrong)


@pytest.mark.parametrize(
    ("flag", "override", "expected"),
    [
        (None, None, (True, False)),
        (True, None, (True, True)),
        (False, None, (False, False)),
        (False, "sliding", (True, False)),
        (None, "none", (False, False)),
        (None, "all", (True, True)),
    ],
)
def test_causality(
    tmp_path: Path, flag: bool | None, override: str | None, expected: tuple[bool, ...]
) -> None:
    path = draft_files.write(tmp_path / "d.gguf", "community", keys=WINDOW | {"A.attention.causal": flag})
    doubtful = flag is False and override is None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = draft_gguf.draft_config(path, TARGET, Overrides(causal=override))
    assert config.causal == expected and config.layer_types == (SLIDING, FULL) and config.sliding_window == 8
    assert ["sliding layers see both ways" in str(each.message) for each in said] == [True] * doubtful


def test_one_flag_is_of_all_layers(tmp_path: Path) -> None:
    keys = WINDOW | {"A.attention.sliding_window_pattern": True}
    assert read(draft_files.write(tmp_path / "d.gguf", "upstream", keys=keys)).layer_types == (
        SLIDING,
        SLIDING,
    )


def test_overrides_are_for_folders_too(tmp_path: Path) -> None:
    config = Overrides(1e5, "all").apply(hf.draft_config(hf_draft(tmp_path / "hf")))
    assert config.rope == RopeConfig(1e5) and config.causal == (True, True)
    with pytest.raises(ConfigError, match="one of all, none, sliding"):
        Overrides(causal="some")


def test_training_facts_are_read_where_they_are(tmp_path: Path) -> None:
    own = {"loss_decay": 3.0, "num_anchors": 96, "target_name": "a target", "target_hash": "ab" * 32}
    keys = {f"dflash.training.{name}": value for name, value in own.items()}
    path = draft_files.write(tmp_path / "d.gguf", "upstream", keys=keys)
    assert draft_gguf.draft_config(path, TARGET).training == Training(**own)


# --- the table ------------------------------------------------------------------------------------------


def test_the_documentation_has_the_table() -> None:
    text = (Path(__file__).parent.parent / "docs" / "formats.md").read_text()
    assert draft_schema.table() in text, "docs/formats.md: put draft_schema.table() there"


def test_the_table_covers_every_field_of_a_config() -> None:
    """What is written is read: no field of DraftConfig but those that other rows make."""
    rows = {row.field for row in draft_schema.ROWS}
    made = {"rope": "rope.freq_base", "layer_types": "sliding", "training": "training.loss_decay"}
    for field in dataclasses.fields(DraftConfig):
        # biases are there or not
        assert made.get(field.name, field.name) in rows or field.name == "attention_bias", field.name
    for field in dataclasses.fields(Training):
        assert f"training.{field.name}" in rows
    for family in draft_schema.FAMILIES:
        keys = [key for _, key in draft_schema.keys(family)]
        assert len(keys) == len(set(keys))
