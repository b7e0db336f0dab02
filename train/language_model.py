"""`python -m train target`: a tiny chat model over bytes, to try everything else with.

Of any family in dflash_jax.targets.FAMILIES, from plain text or from exercises.py, in minutes on a CPU. A
plain text becomes conversations: the user gives a paragraph's beginning, the model goes on with it. The
result is a Hugging Face folder that dflash_jax.pair.load, transformers and others read. Not a pretraining
stack: one device, no resume, no evaluation.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import decode, tokenizer
from dflash_jax.config import ConfigError, RopeConfig, TargetConfig
from dflash_jax.state import AUTOREGRESSIVE, Models
from dflash_jax.targets import abstract_params, make_target
from dflash_jax.terminal import Screen
from dflash_jax.weights import hf
from train import byte_vocabulary, step
from train.conversations import Message, messages_of, objects
from train.exercises import exercises
from train.progress import Progress
from train.settings import LanguageModel, Settings

_OPENING = 24  # characters that the user gives at least; a paragraph has twice as many at least
_EXERCISES = 4000
_WARMUP, _FINAL = 0.05, 0.05  # shares: of the steps, of the rate

Messages = list[Message]


def run(settings: Settings, screen: Screen) -> int:
    wanted, folder = settings.language_model, settings.within(settings.language_model.out)
    config = target_config(wanted)
    texts = read(wanted.text) if wanted.text else _asked(exercises(_EXERCISES, wanted.seed))
    byte_vocabulary.write(folder)
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
    print("next: python -m train synthesize with the same --config")
    return 0


def target_config(wanted: LanguageModel) -> TargetConfig:
    """ConfigError for a family that is not known and for shapes that do not fit."""
    return TargetConfig(
        family=wanted.family,
        hidden_size=wanted.hidden_size,
        num_layers=wanted.layers,
        num_heads=wanted.heads,
        num_kv_heads=wanted.kv_heads,
        head_dim=wanted.head_dim,
        intermediate_size=wanted.intermediate_size,
        vocab_size=byte_vocabulary.SIZE,
        rope=RopeConfig(1e4),
        tie_word_embeddings=True,
        attention_bias=wanted.family == "qwen2",
        max_positions=wanted.length,
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
    """Norms 1, biases 0, matrices normal with deviation 0.02: what targets.init_params draws, without the
    programs that Flax's initialisation compiles one by one."""
    generator = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if len(leaf.shape) == 1:
            return jnp.full(leaf.shape, float(path[-1].key != "bias"), jnp.float32)
        return jnp.asarray(0.02 * generator.standard_normal(leaf.shape, np.float32))

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


def _encode(words: tokenizer.Tokenizer, messages: Messages) -> list[int]:
    return words.chat(messages, add_generation_prompt=False)


# --- text to conversations --------------------------------------------------------------------------------


def read(paths: Sequence[Path]) -> list[Messages]:
    """Conversations of plain text files and of JSONL with {"text": "..."} or {"messages": [...]} a line.
    ConfigError names the file (and line) that cannot be used."""
    made: list[Messages] = []
    for path in paths:
        if path.suffix == ".jsonl":
            for line in objects(path):
                made += paragraphs(line.text("text")) if "text" in line else [messages_of(line)]
        else:
            try:
                made += paragraphs(path.read_text("utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}: language_model.text cannot be read ({error})") from None
    if not made:
        raise ConfigError(
            f"language_model.text: {', '.join(map(str, paths))} hold no paragraph of {2 * _OPENING} characters"
        )
    return made


def paragraphs(text: str) -> list[Messages]:
    """The user's turn is a paragraph's beginning, up to the first word after _OPENING characters; the answer
    is the rest. A paragraph that is too short is joined with the next."""
    made: list[tuple[str, str]] = []
    waiting = ""
    for part in re.split(r"\n\s*\n", text):
        waiting = f"{waiting}\n{part.strip()}".strip()
        cut = waiting.find(" ", _OPENING)
        if len(waiting) >= 2 * _OPENING and cut > 0:
            made.append((waiting[:cut], waiting[cut + 1 :]))
            waiting = ""
    return _asked(made)


def _asked(pairs: Sequence[tuple[str, str]]) -> list[Messages]:
    return [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in pairs
    ]
