"""GGUF drafts that cannot be used: one sentence that names all that is wrong, whatever was damaged, and no
allocation that the file does not account for."""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draft_files
import numpy as np
import pytest
from damage import assert_only_config_errors
from draft_files import EXPECTED, WINDOW

from dflash_jax import drafts, testing
from dflash_jax.config import ConfigError, DraftConfig, RopeConfig
from dflash_jax.weights import draft_gguf, gguf
from dflash_jax.weights.tensors import flatten

TARGET = testing.target_config("qwen3", hidden_size=64, num_layers=7, vocab_size=80, rope=RopeConfig(1e6))


def read(path: Path) -> DraftConfig:
    """Without the warning of Luce's taps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*names no target layers", UserWarning)
        return draft_gguf.draft_config(path, TARGET)


@pytest.mark.parametrize(
    ("family", "keys", "says"),
    [
        ("upstream", {"A.target_layers": None}, r"dflash\.target_layers is missing"),
        ("upstream", {"A.target_layers": [0, 2, 4]}, "taps target layer -1, but"),
        ("upstream", {"A.target_layers": [2, 4, 8]}, "taps target layer 7, but the target has 7 layers"),
        ("upstream", {"A.target_layers": 3}, "must be an array of integers"),
        ("upstream", {"A.target_layers": []}, "names no target layers"),
        ("upstream", {"A.target_layers": [1] * 5000}, "holds 5000 integers"),
        ("upstream", {"tokenizer.ggml.mask_token_id": None}, r"tokenizer\.ggml\.mask_token_id is missing"),
        ("upstream", {"tokenizer.ggml.mask_token_id": 80}, "mask_token_id is 80, outside the 80 embedding rows"),
        ("upstream", {"A.block_size": 1}, "block_size is 1: it must be at least 2"),
        ("upstream", {"A.block_size": 2**31}, r"dflash\.block_size is 2147483648: it must be between 0 and 4096"),
        ("upstream", {"A.block_count": 0}, "num_layers is 0"),
        ("upstream", {"A.block_count": 4000}, r"dflash\.block_count is 4000: it must be between 0 and 25"),
        ("upstream", {"A.embedding_length": 2**31}, r"embedding_length is 2147483648"),
        ("upstream", {"A.attention.key_length": None}, r"attention\.key_length is missing"),
        ("upstream", {"A.attention.key_length": 31, "A.attention.value_length": 31}, "rope needs an even one"),
        ("upstream", {"A.attention.value_length": 16}, r"attention\.value_length is 16, but keys have 32"),
        ("upstream", {"A.attention.head_count_kv": 3}, "not a multiple"),
        ("upstream", {"A.attention.head_count": "four"}, "must be an integer"),
        ("upstream", {"A.rope.dimension_count": 16}, r"dimension_count is 16, but all of a head rotates"),
        ("upstream", {"A.rope.dimension_sections": [8, 8, 0, 0]}, "only plain RoPE is supported"),
        ("upstream", {"A.rope.scaling.type": "longrope", "A.rope.scaling.factor": 2.0}, "none, linear or yarn"),
        ("upstream", {"A.rope.freq_base": 0.0}, "rope theta is 0.0"),
        ("upstream", {"A.attention.sliding_window": 8}, r"sliding_window_pattern is missing"),
        (
            "upstream",
            {"A.attention.sliding_window_pattern": [True, False]},
            r"attention\.sliding_window is missing or 0: the pattern has sliding layers",
        ),
        ("upstream", WINDOW | {"A.attention.sliding_window_pattern": [True] * 3}, "names 3 layer types for 2"),
        ("upstream", WINDOW | {"A.attention.sliding_window_pattern": [1, 0]}, "must be an array of flags"),
        ("upstream", {"A.attention.causal": 1}, "must be true or false"),
        ("luce", {"A.dflash.n_target_layers": None}, r"dflash\.target_layer_ids is missing"),
        ("luce", {"A.dflash.n_target_layers": 2**31 - 1}, "must be between 0 and 4096"),
        ("luce", {"A.dflash.target_layer_ids": [1, 2]}, "n_target_layers is 3, but the number of taps is 2"),
        ("luce", {"A.dflash.block_size": None}, r"dflash\.block_size is missing"),
        ("community", {"A.dflash.n_target_features": 100}, "n_target_features is 100, but 3 taps give 192"),
        ("upstream", {"general.architecture": "gemma4-dflash-draft"}, "drafts can be dflash, qwen35-dflash-draft"),
        ("upstream", {"split.count": 2}, r"split\.count is 2: join the parts"),
        ("upstream", {"A.markov_rank": 8}, "markov_rank belongs to a DSpark draft"),
        ("upstream", {"A.selector_rank": 8}, "selector_rank belongs to a DFlash 2 draft"),
        ("upstream", {"A.conv_kernel_size": 2}, "conv_kernel_size belongs to a DFlash 2 draft"),
        ("luce", {"A.dflash.domino.enabled": 1}, "belongs to a Domino draft"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, family: str, keys: dict, says: str
) -> None:
    path = draft_files.write(tmp_path / "d.gguf", family, keys=keys)
    assert gguf.is_draft(path)
    with pytest.raises(ConfigError, match=says) as error:
        read(path)
    text = str(error.value)
    assert text.startswith(str(path)) and text.count(str(path)) == 1 and "\n" not in text


def test_all_that_is_wrong_with_the_metadata_is_said_at_once(tmp_path: Path) -> None:
    keys = {"A.attention.head_count": None, "A.embedding_length": "wide", "A.target_layers": None}
    with pytest.raises(ConfigError) as error:
        read(draft_files.write(tmp_path / "d.gguf", "upstream", keys=keys))
    for part in ("attention.head_count is missing", "must be an integer", "dflash.target_layers is missing"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("d2t", "a speculators checkpoint or an EAGLE-3 draft"),
        ("d2t.weight", "a speculators checkpoint or an EAGLE-3 draft"),
        ("blk.0.attn_sinks.weight", "a draft with attention sinks"),
        ("markov_w1.weight", "a DSpark draft"),
        ("dflash.dspark.markov.w1", "a DSpark draft"),
        ("selector_hidden.weight", "a DFlash 2 draft"),
        ("blk.0.attn_conv_base", "a DFlash 2 draft"),
        ("blk.1.ffn_conv_proj.weight", "a DFlash 2 draft"),
        ("dflash.domino.start", "a Domino draft"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path: Path, name: str, says: str) -> None:
    path = draft_files.write(tmp_path / "d.gguf", "upstream", extra={name: np.ones(64, np.float32)})
    with pytest.raises(ConfigError, match=rf"tensor {name} belongs to {says}"):
        draft_gguf.draft_config(path, TARGET)
    # a draft that adds nothing: the key says that the part is not there
    off = draft_files.write(tmp_path / "off.gguf", "upstream", keys={"A.markov_rank": 0})
    draft_gguf.draft_config(off, TARGET)


def test_tensors_that_do_not_fit_are_listed_at_once(tmp_path: Path) -> None:
    extra: dict[str, np.ndarray | None] = {
        "blk.1.attn_q_norm.weight": None,
        "fc.weight": np.ones((64, 128), np.float32),
        "blk.2.ffn_up.weight": np.ones((96, 64), np.float32),
        "rope_freqs.weight": np.ones(16, np.float32),
        "blk.0.attn_q.bias": np.ones(128, np.float32),
    }
    path = draft_files.write(tmp_path / "d.gguf", "upstream", extra=extra)
    config = draft_gguf.draft_config(path, TARGET)
    assert config.attention_bias
    with pytest.raises(ConfigError) as error:
        draft_gguf.check_draft(path, config, drafts.abstract_params(config))
    for part in (
        "fc.weight takes 128 features, but 3 taps (target_layer_ids) of 64 give 192",
        "missing blk.1.attn_q_norm.weight [32]",
        "missing blk.0.attn_k.bias [64]",
        "unknown blk.2.ffn_up.weight [96, 64]",
        "unknown rope_freqs.weight [16]",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: data[:200], "truncated or damaged"),
        (lambda data: b"PK\x03\x04" + data[4:], "not a GGUF file"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "the number of tensors is"),
        (lambda data: data[:24] + b"\xff" * 8 + data[32:], "a metadata key needs"),
        (lambda data: data[:4] + b"\x09" + data[5:], "version 9"),
    ],
)
def test_damaged_files_are_one_sentence(tmp_path: Path, spoil: Callable[[bytes], bytes], says: str) -> None:
    path = draft_files.write(tmp_path / "d.gguf", "upstream")
    path.write_bytes(spoil(path.read_bytes()))
    for ask in (gguf.is_draft, draft_gguf.draft_config, draft_gguf.shape_config):
        with pytest.raises(ConfigError, match=says) as error:
            ask(path)
        assert str(error.value).startswith(str(path))


def test_a_folder_and_nothing_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        draft_gguf.draft_config(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        draft_gguf.draft_config(tmp_path / "absent.gguf")


@pytest.mark.parametrize("family", ["upstream", "luce"])
def test_random_damage_gives_a_sentence_or_a_load(tmp_path: Path, family: str) -> None:
    """250 of each, through everything that loading does; whatever config comes out, its shapes are asked for."""
    path = draft_files.write(tmp_path / "d.gguf", family)
    data = path.read_bytes()
    sound = read(path)
    peaks = []

    def sizes(config: DraftConfig) -> tuple:
        fields = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        more = (config.block_size, len(config.taps), config.attention_bias)
        return (*(getattr(config, field) for field in fields), *more)

    def measured(call: Callable[..., Any], *given: Any) -> Any:
        """What NumPy and Python allocate for a call, without the tracing of shapes, which is JAX's."""
        tracemalloc.start()
        try:
            return call(*given)
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    def load(changed: bytes, i: int) -> None:
        path.write_bytes(changed)
        run = measured if i % 5 == 0 else lambda call, *given: call(*given)
        config = run(draft_gguf.draft_config, path, TARGET)
        # tracing shapes is most of the time: once more only where they may differ
        wants = EXPECTED if sizes(config) == sizes(sound) else drafts.abstract_params(config)
        loaded = run(draft_gguf.load_draft, path, config, wants, np.float32)
        shapes = {name: value.shape for name, value in flatten(loaded).items()}
        assert shapes == {name: value.shape for name, value in flatten(wants).items()}

    assert_only_config_errors(load, data, data.rindex(b"blk.1.") + 60, seed=4, count=250)
    assert len(peaks) >= 50 and max(peaks) < 2 * len(data)
