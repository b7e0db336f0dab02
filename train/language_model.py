"""`python -m train target`: a tiny chat model over bytes, to try everything else with.

Of any family in dflash_jax.targets.FAMILIES, from plain text (plain_text.py) or from exercises.py, in minutes
on a CPU. The result is a Hugging Face folder that dflash_jax.pair.load, transformers and others read. Not a
pretraining stack: one device, no resume, no evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import decode, tokenizer
from dflash_jax.config import (
    FULL,
    RECURRENT,
    ConfigError,
    MoeConfig,
    RecurrentConfig,
    RopeConfig,
    TargetConfig,
)
from dflash_jax.state import AUTOREGRESSIVE, Models
from dflash_jax.targets import abstract_params, make_target
from dflash_jax.terminal import Screen
from dflash_jax.weights import hf
from dflash_jax.weights.fields import naming
from train import byte_vocabulary, plain_text, step
from train.exercises import exercises
from train.plain_text import Messages
from train.progress import Progress
from train.settings import LanguageModel, Settings

_EXERCISES = 4000
_WARMUP, _FINAL = 0.05, 0.05  # shares: of the steps, of the rate


def run(settings: Settings, screen: Screen) -> int:
    wanted, folder = settings.language_model, settings.within(settings.language_model.out)
    config = target_config(wanted)
    texts, held_out = plain_text.split(_conversations(wanted), wanted.prompts, wanted.seed)
    byte_vocabulary.write(folder)
    if held_out:
        plain_text.write_prompts(settings.within(Path("prompts.jsonl")), held_out)
    words = tokenizer.from_folder(folder)
    encoded = [_encode(words, messages) for messages in texts]
    began = time.monotonic()
    params, loss = fit(config, wanted, encoded)
    hf.save_target(folder, config, jax.tree.map(np.asarray, params), np.float32)
    prompt = texts[-1][:1]
    models = Models(params, target=make_target(config))
    answer = decode.complete(
        models,
        [words.chat(prompt)],
        AUTOREGRESSIVE,
        max_new_tokens=wanted.length // 2,
        stop_ids=words.stop_ids,
    )
    screen.clear()
    size = sum(x.size for x in jax.tree.leaves(params))
    print(
        f"{folder}: {config.family}, {config.num_layers} layers, {size:,} parameters, from {len(texts)} "
        f"conversations in {time.monotonic() - began:.0f} s; loss {loss:.3f} nats a byte"
    )
    print(f"asked {prompt[0]['content']!r} it answers {words.decode(answer.tokens[0])!r}")
    target = "" if Path(settings.target) == folder else f" and --target {folder}"
    print(f"next: python -m train synthesize, with the same flags{target}")
    return 0


def target_config(wanted: LanguageModel) -> TargetConfig:
    """ConfigError for a family that is not known and for shapes that do not fit."""
    w = wanted
    hybrid, routed = w.family in ("qwen3_5", "qwen3_5_moe"), w.family in ("qwen3_moe", "qwen3_5_moe")
    if hybrid and w.interval > w.layers:
        raise ConfigError(
            f"language_model.interval is {w.interval}, but there are {w.layers} layers: lower it, so that one of "
            "them has attention"
        )
    kinds = (RECURRENT if hybrid and (i + 1) % w.interval else FULL for i in range(w.layers))
    recurrent, moe = None, None
    with naming("language_model"):
        if hybrid:
            recurrent = RecurrentConfig(w.key_heads, w.value_heads, w.key_dim, w.value_dim)
        if routed:
            shared = w.expert_size if hybrid else 0
            moe = MoeConfig(w.experts, w.experts_per_token, w.expert_size, (True,) * w.layers, shared)
        return TargetConfig(
            family=w.family,
            hidden_size=w.hidden_size,
            num_layers=w.layers,
            num_heads=w.heads,
            num_kv_heads=w.kv_heads,
            head_dim=w.head_dim,
            # Qwen3.5's routed models have no dense MLP anywhere: the experts' size stands for it
            intermediate_size=w.expert_size if hybrid and routed else w.intermediate_size,
            vocab_size=byte_vocabulary.SIZE,
            rope=RopeConfig(1e4),
            tie_word_embeddings=True,
            attention_bias=w.family == "qwen2",
            max_positions=w.length,
            layer_types=tuple(kinds),
            rotary_dim=max(2, w.head_dim // 8 * 2) if hybrid else 0,  # a quarter, as in published models
            recurrent=recurrent,
            moe=moe,
        )


def fit(config: TargetConfig, wanted: LanguageModel, texts: Sequence[Sequence[int]]) -> tuple[dict, float]:
    """Trained parameters (float32), and the mean loss of the last tenth of the steps."""
    target = make_target(config)
    params = start(config, wanted.seed)
    state = step.State(params, step.language_optimizer().init(params), jnp.zeros((), jnp.int32))
    rows = batches(texts, wanted.rows, wanted.length, wanted.seed)
    losses: list[jax.Array] = []
    progress = Progress("training the target", wanted.steps, "steps")
    for n in range(wanted.steps):
        state, loss = step.language_step(target, state, next(rows), jnp.float32(rate(wanted, n)))
        losses.append(loss)
        if progress.due():  # reading a loss waits for the device
            progress.show(n + 1, f"loss {float(loss):.3f}")
    last = float(np.mean([float(loss) for loss in losses[-max(1, wanted.steps // 10) :]]))
    if not math.isfinite(last):
        raise ConfigError(f"language_model.rate is {wanted.rate}: the loss became {last}: lower it")
    return state.params, last


def start(config: TargetConfig, seed: int) -> dict:
    """Random float32 parameters, without the programs that Flax's initialisation compiles one by one.

    Matrices are normal with deviation 0.02, norms begin as the identity, biases at 0. Heads of gated delta
    layers begin as Mamba-2's: they forget within one token to a thousand, spread evenly over the logarithm.
    """
    generator = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = [entry.key for entry in path]
        if names[-1] == "A_log":
            values = np.log(generator.uniform(1, 16, leaf.shape))
        elif names[-1] == "dt_bias":  # softplus of it is 0.001 to 0.1
            values = np.log(np.expm1(np.exp(generator.uniform(np.log(1e-3), np.log(1e-1), leaf.shape))))
        elif names[-2] == "conv1d":
            values = generator.uniform(-1, 1, leaf.shape) * leaf.shape[-1] ** -0.5
        elif len(leaf.shape) == 1:
            # hybrid targets multiply by 1 + w, except in the norm within a delta layer
            plain = config.recurrent is None or "linear_attn" in names
            values = np.full(leaf.shape, float(plain and names[-1] != "bias"))
        else:
            values = 0.02 * generator.standard_normal(leaf.shape, np.float32)
        return jnp.asarray(values, jnp.float32)

    made: dict = jax.tree_util.tree_map_with_path(draw, abstract_params(config))
    return made


def rate(wanted: LanguageModel, n: int) -> float:
    """Linear warm-up, then a cosine."""
    warm = max(1.0, _WARMUP * wanted.steps)
    if n < warm:
        return wanted.rate * (n + 1) / warm
    share = (n - warm) / max(1.0, wanted.steps - warm)
    return wanted.rate * (_FINAL + (1 - _FINAL) * 0.5 * (1 + math.cos(math.pi * share)))


def batches(texts: Sequence[Sequence[int]], rows: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """[rows, length + 1] i32 without end: every row begins with a conversation and goes on with others."""
    generator = np.random.default_rng(seed)
    order: list[int] = []
    while True:
        made = np.empty((rows, length + 1), np.int32)
        for row in made:
            filled: list[int] = []
            while len(filled) <= length:
                order = order or generator.permutation(len(texts)).tolist()
                filled += [*texts[order.pop()], byte_vocabulary.END_OF_TEXT]
            row[:] = filled[: length + 1]
        yield made


def _conversations(wanted: LanguageModel) -> list[Messages]:
    paths = [*wanted.text, *(plain_text.library_sources() if wanted.library else ())]
    return plain_text.read(paths) if paths else plain_text.asked(exercises(_EXERCISES, wanted.seed))


def _encode(words: tokenizer.Tokenizer, messages: Messages) -> list[int]:
    return words.chat(messages, add_generation_prompt=False)
