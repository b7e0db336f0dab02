"""Targets against transformers, layer by layer: in one piece, in chunks, token by token, and on trees."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import transformers
from parity.twins import (
    VOCAB,
    Twin,
    all_layers,
    committed,
    difference,
    empty_cache,
    forward,
    read_target,
    target_twin,
    torch_recurrent,
    torch_states,
    vision_twin,
)

from dflash_jax.block import chain_block, tree_block
from dflash_jax.cache import RecurrentState, TargetCache
from dflash_jax.config import FULL, RECURRENT, SLIDING
from dflash_jax.gated_delta import CHUNK
from dflash_jax.weights import hf

# Stretched ropes: the original length is shorter than the sequences here, and of the few frequencies of a
# head of 8 or 16 some are kept, some blended and some stretched.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.1,
}
SLIDE = {"use_sliding_window": True, "sliding_window": 6}
ALTERNATE = ["full_attention", "sliding_attention"] * 2

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-tied-biases": {
        "family": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
    },
    "llama-linear": {"family": "llama", "rope": {"rope_type": "linear", "factor": 3.0}},
    "llama-llama3": {"family": "llama", "rope": LLAMA3},
    "llama-yarn": {"family": "llama", "rope": YARN},
    "qwen2": {"family": "qwen2"},
    "qwen2-sliding": {"family": "qwen2", "max_window_layers": 2, **SLIDE},
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "qwen3-tied-biases-yarn": {
        "family": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope": YARN | {"attention_factor": 1.3, "truncate": False},
    },
    "qwen3-sliding": {"family": "qwen3", "head_dim": 16, "layer_types": ALTERNATE, **SLIDE},
    "qwen3_5": {"family": "qwen3_5"},  # three gated delta layers, then attention
    "qwen3_5-alternate-yarn": {"family": "qwen3_5", "layer_types": [RECURRENT, FULL] * 2, "rope": YARN},
    "qwen3_5-attention-first-tied-biases": {
        "family": "qwen3_5",
        "layer_types": [FULL, RECURRENT, RECURRENT, RECURRENT],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
        "rope": {"partial_rotary_factor": 0.5},
    },
    "qwen3_5-vision": {"family": "qwen3_5"},
    "qwen3_moe-normalised-tied-biases": {
        "family": "qwen3_moe",
        "head_dim": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [3],
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    # Two layers: a routed one takes seconds to compile, and what four show the dense kinds show.
    "qwen3_moe-sliding": {"family": "qwen3_moe", "num_hidden_layers": 2, "mlp_only_layers": [0], **SLIDE},
    "qwen3_5_moe-alternate": {
        "family": "qwen3_5_moe",
        "num_hidden_layers": 2,
        "layer_types": [FULL, RECURRENT],
    },
    "qwen3_5_moe-vision": {
        "family": "qwen3_5_moe",
        "num_hidden_layers": 2,
        "layer_types": [RECURRENT, FULL],
    },
}
LENGTHS = (41, 17, 1)  # past the original rope length; past the window; a row that is done at once
SLOTS = 2 * max(LENGTHS)  # of every cache, so that tests share their programs
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=KINDS)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    make = vision_twin if "vision" in request.param else target_twin
    return make(tmp_path_factory.mktemp(request.param), **KINDS[request.param])


def sequences(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def feed(
    twin: Twin, rows: list[list[int]], width: int, cache: TargetCache
) -> tuple[list[np.ndarray], list[np.ndarray], TargetCache]:
    """All layers' outputs and logits of each row, fed in chunks of `width`; rows that have ended idle as
    padding. Returns what each row's own positions gave, and the cache with all of them committed."""
    config = twin.module.config
    states: list[list[np.ndarray]] = [[] for _ in rows]
    logits: list[list[np.ndarray]] = [[] for _ in rows]
    for first in range(0, max(map(len, rows)), width):
        parts = [row[first : first + width] for row in rows]
        count = np.array([len(part) for part in parts], np.int32)
        tokens = np.array([part + [VOCAB - 1] * (width - len(part)) for part in parts], np.int32)
        block = chain_block(jnp.asarray(tokens), jnp.asarray(np.arange(width) < count[:, None]))
        out = forward(twin.module, twin.params, block, cache, all_layers(config))
        cache = committed(cache, out.trail, jnp.broadcast_to(jnp.arange(width), tokens.shape), count)
        for b, n in enumerate(count):
            states[b].append(np.asarray(out.features[b, :n], np.float32))
            logits[b].append(np.asarray(out.logits[b, :n]))
    return [np.concatenate(x) for x in states], [np.concatenate(x) for x in logits], cache


@pytest.mark.parametrize("width", [1, 7, max(LENGTHS)])
def test_every_layer_in_chunks(twin: Twin, width: int) -> None:
    """Cases 15 and 16: taps and logits equal the twin's, whatever the chunks, in rows of other lengths."""
    if twin.module.config.moe is not None and width != 7:
        pytest.skip(
            "a routed program takes seconds to compile, and tests/test_moe.py has all sizes of experts' rows"
        )
    rows = sequences()
    states, logits, cache = feed(twin, rows, width, empty_cache(twin.module.config, len(rows), SLOTS))
    assert cache.length.tolist() == list(LENGTHS)
    for b, row in enumerate(rows):
        theirs = torch_states(twin.torch, row)
        gaps = difference(states[b], theirs[0]), difference(logits[b], theirs[1])
        assert max(gaps) <= TOLERANCE, f"row {b}: layers differ by {gaps[0]:.2e}, logits by {gaps[1]:.2e}"


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5-attention-first-tied-biases"])
@pytest.mark.parametrize("width", [5, 2 * CHUNK + 22])
def test_recurrent_states(kind: str, width: int, tmp_path: Path) -> None:
    """What every gated delta layer carries after a text, fed in small blocks and in one that is chunked."""
    twin = target_twin(tmp_path, **KINDS[kind])
    rng, length = np.random.default_rng(3), 2 * CHUNK + 22
    text = rng.integers(0, VOCAB, length).tolist()
    _, logits, cache = feed(twin, [text], width, empty_cache(twin.module.config, 1, length + width))
    assert difference(logits[0], torch_states(twin.torch, text)[1]) <= TOLERANCE
    theirs = torch_recurrent(twin.torch, text)
    assert set(theirs) == {i for i, kind in enumerate(twin.module.config.layer_types) if kind == RECURRENT}
    for i, (s, conv) in theirs.items():
        ours = cache.layers[i]
        assert isinstance(ours, RecurrentState)
        assert difference(ours.s[0], s) <= TOLERANCE, f"layer {i}"
        assert difference(ours.conv[0], conv[-ours.conv.shape[1] :]) <= TOLERANCE, f"layer {i}"


def random_tree(rng: np.random.Generator, size: int) -> tuple[list[int], list[int]]:
    """(tokens, parents). Half of the nodes continue the node before, so that the tree is deep as well as
    wide; the others branch anywhere. Tokens repeat freely: a forward does not mind equal siblings."""
    parents = [-1, *(i - 1 if rng.random() < 0.5 else int(rng.integers(0, i)) for i in range(1, size))]
    return rng.integers(0, VOCAB, size).tolist(), parents


def root_path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


tree = jax.jit(tree_block)


def test_tree_nodes_equal_their_root_paths(twin: Twin) -> None:
    """Case 36: a node sees the committed prefix and its ancestors, nothing else; and what is committed
    along a path is what feeding that path would have left (the nodes after it agree again)."""
    rng = np.random.default_rng(1)
    size, prefixes = 12, sequences(2)
    trees = [random_tree(rng, size) for _ in prefixes]
    _, _, cache = feed(twin, prefixes, 7, empty_cache(twin.module.config, len(prefixes), SLOTS))
    block = tree(jnp.asarray([t for t, _ in trees]), jnp.asarray([p for _, p in trees]))
    out = forward(twin.module, twin.params, block, cache, all_layers(twin.module.config))
    deepest = []
    for b, (prefix, (tokens, parents)) in enumerate(zip(prefixes, trees, strict=True)):
        paths = [root_path(parents, leaf) for leaf in set(range(size)) - set(parents)]
        for path in paths:  # which together hold all nodes
            states, logits = torch_states(twin.torch, prefix + [tokens[i] for i in path])
            nodes = np.array(path)
            assert difference(out.features[b, nodes], states[len(prefix) :]) <= TOLERANCE, (b, path)
            assert difference(out.logits[b, nodes], logits[len(prefix) :]) <= TOLERANCE, (b, path)
        deepest.append(max(paths, key=len))
    assert max(map(len, deepest)) > 6, "a window of 6 must end inside some path"

    count = [len(path) for path in deepest]
    filled = jnp.asarray([path + [0] * (size - len(path)) for path in deepest])
    cache = committed(cache, out.trail, filled, jnp.asarray(count, jnp.int32))
    tail = rng.integers(0, VOCAB, 7).tolist()
    _, logits, _ = feed(twin, [tail] * len(prefixes), 7, cache)
    for b, (prefix, (tokens, _)) in enumerate(zip(prefixes, trees, strict=True)):
        expected = torch_states(twin.torch, prefix + [tokens[i] for i in deepest[b]] + tail)[1]
        assert difference(logits[b], expected[-len(tail) :]) <= TOLERANCE


def test_kinds_are_what_they_say(twin: Twin, request: pytest.FixtureRequest) -> None:
    """The config that was read has the feature that the kind is here for: else the rest tests less."""
    config, name = twin.module.config, request.node.callspec.params["twin"]
    assert config.tie_word_embeddings == ("tied" in name) == ("lm_head" not in twin.params)
    assert (SLIDING in config.layer_types) == ("sliding" in name) == (config.sliding_window is not None)
    assert config.rope.type == next((t for t in ("linear", "llama3", "yarn") if t in name), "default")
    projection = twin.params[f"layers_{[kind == RECURRENT for kind in config.layer_types].index(False)}"][
        "self_attn"
    ]
    assert ("bias" in projection["q_proj"]) == (config.family == "qwen2" or "biases" in name)
    assert ("bias" in projection["o_proj"]) == ("biases" in name)
    if config.family == "qwen3":
        assert config.head_dim != config.hidden_size // config.num_heads
    if config.moe is not None:
        dense = [i for i, routed in enumerate(config.moe.layers) if not routed]
        assert dense == ([0, 2, 3] if "normalised" in name else [0] if "sliding" in name else [])
        assert config.moe.normalise == ("normalised" in name or config.family == "qwen3_5_moe")
        for i, routed in enumerate(config.moe.layers):
            assert ("experts" in twin.params[f"layers_{i}"]["mlp"]) == routed
    if config.recurrent is not None:
        assert config.rotary_dim == (8 if "first" in name else 4) < config.head_dim
        assert {f"layers_{i}" for i, kind in enumerate(config.layer_types) if kind == RECURRENT} == {
            layer for layer, modules in twin.params.items() if "linear_attn" in modules
        }


def test_transformers_reads_what_we_write(twin: Twin, tmp_path: Path) -> None:
    """Same logits from the folder that we save: nothing of the config or of the weights is lost or turned."""
    hf.save_target(tmp_path, twin.module.config, twin.params, np.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    written = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path)
    text = sequences()[1]
    assert difference(*(torch_states(model, text)[1] for model in (written.eval(), twin.torch))) <= 1e-6


def test_other_ways_to_ask(tmp_path: Path) -> None:
    """logits "last" reads each row's last valid node, None runs no head, embeddings replace the lookup."""
    twin = target_twin(tmp_path, **KINDS["llama"])
    rows, width = sequences(), max(LENGTHS)
    tokens = jnp.asarray([row + [0] * (width - len(row)) for row in rows])
    block = chain_block(tokens, jnp.arange(width)[None] < jnp.asarray(LENGTHS)[:, None])
    cache = empty_cache(twin.module.config, len(rows), width)
    embeddings = jnp.asarray(twin.torch.model.embed_tokens.weight.detach().numpy())[tokens]
    blank = dataclasses.replace(block, tokens=jnp.zeros_like(tokens))
    out = forward(twin.module, twin.params, blank, cache, logits="last", embeddings=embeddings)
    assert out.logits.shape == (len(rows), 1, VOCAB) and out.features.shape[-1] == 0
    for b, row in enumerate(rows):
        assert difference(out.logits[b, 0], torch_states(twin.torch, row)[1][-1]) <= TOLERANCE
    assert forward(twin.module, twin.params, block, cache, logits=None).logits is None


def spread(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Root mean square difference: rounding errors are many, and their maximum scatters."""
    return float(np.sqrt(np.mean(np.square(np.asarray(ours, np.float64) - theirs))))


@pytest.mark.parametrize(
    "kind",
    ["llama-tied-biases", "qwen2-sliding", "qwen3", "qwen3_5", "qwen3_moe-sliding", "qwen3_5_moe-alternate"],
)
def test_bfloat16_rounds_like_the_twin(kind: str, tmp_path: Path) -> None:
    """Two right implementations differ visibly in bf16, which has 8 bits. The yardstick is what the twin
    itself loses: ours loses as much of its float32 numbers (measured: 0.90 to 1.15 of it), and lies no
    further from its bf16 ones than two independent errors of that size would (measured: 0.93 to 1.16)."""
    twin = target_twin(tmp_path, **KINDS[kind])
    module, params = read_target(tmp_path, ml_dtypes.bfloat16)
    halved = copy.deepcopy(twin.torch).bfloat16()
    rows, width = sequences(), max(LENGTHS)
    cache = empty_cache(module.config, len(rows), SLOTS, ml_dtypes.bfloat16)
    ours = feed(dataclasses.replace(twin, module=module, params=params), rows, width, cache)
    for b, row in enumerate(rows[:2]):
        exact, rounded = torch_states(twin.torch, row), torch_states(halved, row)
        for mine, exactly, theirs in zip((ours[0][b], ours[1][b]), exact, rounded, strict=True):
            loss = spread(theirs, exactly)
            assert loss > 1e-3, "nothing was rounded"
            assert spread(mine, exactly) <= 1.3 * loss
            assert spread(mine, theirs) <= 1.42 * loss
