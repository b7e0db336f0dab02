"""How many tokens a round commits: foretold on held-out conversations, and measured in the real decoder.

Foretold are two figures: tau at uniform anchors (cheap, flattering: long accepted stretches hold many
anchors) and the walk, which starts at the answer and jumps by what was accepted, as decoding does (1.63
where uniform anchors gave 1.77 on the same text). Checkpoints are chosen by the walk. The decoder's own tau
is the truth for these prompts: there the text is what the target says now, not what it said before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dflash_jax import decode, pair, plain_json
from dflash_jax.config import ConfigError, DraftConfig
from dflash_jax.drafts import DFlash
from dflash_jax.generation import Generation
from dflash_jax.policy import Fixed
from dflash_jax.sampling import sampling
from dflash_jax.state import Models, Options
from dflash_jax.terminal import Screen
from dflash_jax.weights.atomic import check_writable, replacing
from train import build, corpus, trained
from train import loss as losses
from train.anchors import eligible
from train.conversations import objects
from train.corpus import Corpus
from train.progress import Progress
from train.settings import Settings
from train.step import Batch, Setup, predict

TEMPERATURES = (0.0, 0.7)
_TOGETHER = 8  # prompts that are decoded in one batch


class Store(Protocol):
    """What features.Store gives: (features [B, S, P*D], final [B, S, D] | None) of these rows."""

    def read(self, rows: np.ndarray, width: int) -> tuple[Any, Any]: ...


# --- foretold: on held-out conversations ------------------------------------------------------------------


def held_out(
    setup: Setup,
    target_params: Any,
    params: Any,
    data: Corpus,
    rows_per_batch: int,
    width: int,
    store: Store | None = None,
) -> dict[str, Any]:
    """loss, accuracy [C-1], recall16 [C-1], tau_uniform over all blocks; walk, and walk_greedy and
    walk_sampled by how the answers were drawn (nan where there are none). Conversations longer than `width`
    are cut. store: of the target's states of `data`; without it the target runs."""
    accepted, total = accepted_lengths(setup, target_params, params, data, rows_per_batch, width, store)
    rounds = [walks(data, accepted, row) for row in range(len(data))]
    result: dict[str, Any] = dict(losses.summary(total))
    for name, chosen in (
        ("walk", np.ones(len(data), bool)),
        ("walk_greedy", data.temperature == 0),
        ("walk_sampled", data.temperature > 0),
    ):
        found = [n for row in np.flatnonzero(chosen) for n in rounds[row]]
        result[name] = float(np.mean(found)) if found else float("nan")
    return result


def accepted_lengths(
    setup: Setup,
    target_params: Any,
    params: Any,
    data: Corpus,
    rows_per_batch: int,
    width: int,
    store: Store | None = None,
) -> tuple[np.ndarray, losses.Metrics]:
    """[N, width] leading matches of the block at every eligible position (0 elsewhere), and metrics over
    all of these blocks."""
    accepted = np.zeros((len(data), width), np.int32)
    total: losses.Metrics | None = None
    for rows, batch in _batches(data, rows_per_batch, width, store):
        possible = np.asarray(eligible(jnp.asarray(batch.supervised)))
        for anchors, keep in _slices(possible, setup.anchors):
            lengths, measured = predict(setup, target_params, params, batch, anchors, keep)
            row, column = np.nonzero(keep)
            accepted[rows[row], anchors[row, column]] = np.asarray(lengths)[row, column]
            total = measured if total is None else jax.tree.map(jnp.add, total, measured)
    if total is None:
        raise ConfigError(f"no answer of two tokens begins within {width} positions: nothing to evaluate")
    return accepted, total


def _batches(data: Corpus, size: int, width: int, store: Store | None) -> Iterator[tuple[np.ndarray, Batch]]:
    """All rows, `size` at a time: one compiled shape, so the last batch is filled with rows that have
    nothing supervised."""
    for first in range(0, len(data), size):
        real = min(size, len(data) - first)
        rows = np.minimum(np.arange(first, first + size), len(data) - 1)
        batch = data.batch(rows, width)
        features, final = (None, None) if store is None else store.read(rows, width)
        supervised = batch.supervised & (np.arange(size) < real)[:, None]
        batch = Batch(batch.tokens, batch.valid, supervised, features, final)
        yield rows, batch


def _slices(possible: np.ndarray, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All possible positions of each row, `count` per slice, as (anchors, keep)."""
    order = np.argsort(~possible, axis=1, kind="stable").astype(np.int32)
    found = possible.sum(1)
    for first in range(0, int(found.max(initial=0)), count):
        index = first + np.arange(count)
        keep = index[None] < found[:, None]
        anchors = order[:, np.minimum(index, possible.shape[1] - 1)]
        yield np.where(keep, anchors, 0), keep


def walks(data: Corpus, accepted: np.ndarray, row: int) -> list[int]:
    """The rounds that decoding would take through the answers of a conversation, each on its own."""
    supervised = data.supervised[row, : accepted.shape[1]].astype(np.int8)
    edges = np.diff(supervised, prepend=0, append=0)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [
        n
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        for n in losses.walk(accepted[row], start, end)
    ]


def batch_shape(data: Corpus, settings: Settings) -> tuple[int, int]:
    """(rows_per_batch, width) for held_out: the longest conversation in steps of 32, as many rows as a
    microbatch of training has positions for."""
    width = min(-(-int(data.length.max()) // 32) * 32, settings.data.max_length)
    return max(1, min(len(data), settings.data.tokens // width)), width


# --- measured: in the real decoder ------------------------------------------------------------------------


def decoded(
    models: Models,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    budget: int,
    stop_ids: Sequence[int],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """temperature, prompts, tokens, rounds, tau, and acceptance [C-1]: the share of rounds that kept
    candidate 1, 2, ...; of `budget` tokens at most after each prompt, in blocks of the draft's own size.
    Prompt i is drawn with seed i."""
    assert models.draft is not None
    options = Options(Fixed(models.draft.config.block_size))
    parts: list[Generation] = []
    for first in range(0, len(prompts), _TOGETHER):
        rows = [list(prompt) for prompt in prompts[first : first + _TOGETHER]]
        fill = min(_TOGETHER, len(prompts)) - len(rows)  # the last batch keeps the compiled size
        done = decode.complete(
            models, rows + rows[:1] * fill, options, max_new_tokens=budget, how=sampling(temperature),
            seeds=[*range(first, first + len(rows)), *[0] * fill], stop_ids=stop_ids,
            capacity=max(map(len, prompts)) + budget,
        )  # fmt: skip
        parts.append(Generation(done.tokens[: len(rows)], [], done.committed[: len(rows)], done.sizes))
        if progress and progress.due():
            progress.show(first + len(rows))
    whole = Generation(
        [row for part in parts for row in part.tokens],
        [],
        [row for part in parts for row in part.committed],
        max((part.sizes for part in parts), key=len),  # all rounds are of one size
    )
    return {
        "temperature": temperature,
        "prompts": len(prompts),
        "tokens": sum(map(len, whole.tokens)),
        "rounds": sum(map(len, whole.committed)),
        "tau": whole.tau,
        "acceptance": whole.acceptance_by_position(),
    }


def read_prompts(path: Path, target: pair.Target, limit: int) -> list[list[int]]:
    """Tokens of the first user turn of each line, at most `limit`, spread evenly over the file. ConfigError
    names the line that has none."""
    texts = []
    for line in objects(path):
        turns = line.texts("turns") if "turns" in line else (line.text("prompt"),)
        if not turns or not turns[0]:
            raise line.error("turns" if "turns" in line else "prompt", "is empty: a prompt is a text")
        texts.append(turns[0])
    words = target.tokenizer
    return [
        words.chat([{"role": "user", "content": text}])
        if words.has_template
        else words.encode(text, bos=True)
        for text in _spread(texts, limit)
    ]


def _spread(items: Sequence[Any], limit: int) -> list[Any]:
    count = min(limit, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def sample(data: Corpus, count: int) -> Corpus:
    """At most `count` conversations, the same ones every time, in their order. By chance and not every n-th:
    the file may alternate between greedy and sampled answers."""
    chosen = np.random.default_rng(0).permutation(len(data))[:count]
    return data.rows(np.sort(chosen))


# --- the command ------------------------------------------------------------------------------------------


def run(settings: Settings, screen: Screen, draft: str | None, prompts: Path | None, out: Path | None) -> int:
    if out is not None:
        check_writable(out)
    target = build.load_target(settings)
    found = trained.load(settings, target, draft)
    config, params = found.config, found.params
    result: dict[str, Any] = {"target": target.source, "draft": found.name, "block_size": config.block_size}
    data = None
    if prompts is None or all(settings.within(file).exists() for file in settings.data.files):
        _, data, _ = corpus.load(settings, target.tokenizer)
        data = sample(data, settings.run.evaluate_conversations)
        setup = build.make_setup(settings, target, config)
        figures = held_out(setup, target.params, params, data, *batch_shape(data, settings))
        result["held_out"] = {"conversations": len(data), **figures}
    if prompts is not None:
        given, asked = prompts.name, read_prompts(prompts, target, settings.run.evaluate_conversations)
    else:
        assert data is not None
        starts = data.starts().tolist()
        given = "held-out conversations"
        asked = [row[:n].tolist() for row, n in zip(data.tokens, starts, strict=True)]
    result["decoder"] = measure(settings, target, config, params, asked, given)
    screen.clear()
    report(result, Console())
    if out is not None:
        with replacing(out) as file:
            file.write((plain_json.text(result, indent=1) + "\n").encode())
        print(f"written: {out}")
    return 0


def measure(
    settings: Settings,
    target: pair.Target,
    config: DraftConfig,
    params: Any,
    prompts: list[list[int]],
    given: str,
) -> dict[str, Any]:
    """decoded at TEMPERATURES, for prompts that leave room for an answer of synthesize.answer_tokens."""
    budget = settings.synthesize.answer_tokens
    context = target.config.max_positions or None
    kept = [prompt for prompt in prompts if context is None or len(prompt) + budget <= context]
    if not kept:
        raise ConfigError(
            f"{given}: no prompt leaves room for synthesize.answer_tokens ({budget}) in a context of {context}"
        )
    dtype = jax.tree.leaves(target.params)[0].dtype
    weights = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    models = Models(target.params, weights, target.module, DFlash(config))
    made = []
    for temperature in TEMPERATURES:
        progress = Progress(f"decoding at temperature {temperature:g}", len(kept), "prompts")
        made.append(decoded(models, kept, temperature, budget, target.stop_ids, progress))
    return {"prompts": given, "too_long": len(prompts) - len(kept), "max_new_tokens": budget, "runs": made}


def report(result: dict[str, Any], console: Console) -> None:
    """The figures in a few lines and one table by slot."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(f"target {result['target']}, draft {result['draft']}, block {result['block_size']}")
    rows: list[tuple[str, Sequence[float]]] = []
    if "held_out" in result:
        found = result["held_out"]
        say(
            f"held-out, {found['conversations']} conversations: tau {found['walk']:.3f} by the walk "
            f"(greedy {found['walk_greedy']:.3f}, sampled {found['walk_sampled']:.3f}), "
            f"{found['tau_uniform']:.3f} at uniform anchors; loss {found['loss']:.3f}"
        )
        rows += [("accuracy", found["accuracy"]), ("recall@16", found["recall16"])]
    for one in result["decoder"]["runs"]:
        say(
            f"decoder, temperature {one['temperature']:g}: tau {one['tau']:.3f} ({one['tokens']:,} tokens in "
            f"{one['rounds']:,} rounds, {one['prompts']} prompts, {result['decoder']['prompts']})"
        )
        rows.append((f"accepted, T={one['temperature']:g}", one["acceptance"]))
    table = Table("slot", *(str(k) for k in range(1, result["block_size"])))
    for label, values in rows:
        table.add_row(label, *(f"{value:.2f}" for value in values))
    console.print(table)
