"""Text in, text out, over a loaded pair.

    session = Session(pair.load("smollm2"))
    answer = session.complete("Why is the sky blue?", Settings(max_new_tokens=64))
    print(answer.text, answer.stats.tau, answer.seconds)

A request runs as one compiled loop. What must look at every round (streaming, a trace, stop strings,
which are text and not tokens) and the debugging modes run the same rounds from Python; the tokens are
the same.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import decode, stepwise
from dflash_jax.buckets import bucket
from dflash_jax.cache import Ring, cache_bytes
from dflash_jax.config import ConfigError
from dflash_jax.generation import Generation, finish
from dflash_jax.pair import DTYPES, Pair, say_memory
from dflash_jax.sampling import sampling
from dflash_jax.state import STOP, RoundState, RoundTrace
from infer.clock import Clock
from infer.completion import Completion, Run, cut_at, row_of
from infer.costs import with_costs
from infer.settings import Plan, Settings, plan
from infer.text import RowText

_log = logging.getLogger(__name__)

OnText = Callable[[int, str], None]  # row, new text
OnRound = Callable[[RoundState, RoundState, RoundTrace], None]  # before, after, what the round saw


class Session:
    """A pair that answers requests. Keeps nothing between them; a conversation is a `chat.Chat`."""

    def __init__(self, pair: Pair, load_seconds: float = 0.0):
        self.pair = pair
        self.load_seconds = load_seconds

    # --- text to tokens ---

    def prompt(self, text: str, system: str | None = None, raw: bool = False) -> list[int]:
        """Tokens of a prompt: in the model's chat format, or as they are with `raw`. Special tokens
        written in the text count as such. ConfigError for an empty prompt."""
        if not text:
            raise ConfigError("the prompt is empty: write one with --prompt or --prompt-file")
        words = self.pair.target.tokenizer
        if raw:
            if system is not None:
                raise ConfigError("a system message needs the chat format: leave --system or --raw out")
            tokens = words.encode(text, bos=True)
        else:
            if not words.has_template:
                raise ConfigError(f"{self.pair.target.source} has no chat template: use --raw")
            tokens = words.chat(conversation(text, system))
        if not tokens:
            raise ConfigError("the prompt has no tokens in this model's vocabulary")
        return tokens

    # --- requests ---

    def complete(self, text: str, settings: Settings = Settings(), **how) -> Completion:  # noqa: B008
        """One prompt, one answer. how: `system` and `raw` as in `prompt`, the rest as in `run`."""
        words = {key: how.pop(key) for key in ("system", "raw") if key in how}
        return self.run([self.prompt(text, **words)], settings, **how).completions[0]

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Settings = Settings(),  # noqa: B008 (frozen)
        *,
        after: RoundState | None = None,
        on_text: OnText | None = None,
        on_round: OnRound | None = None,
        capacity: int | None = None,
    ) -> Run:
        """Decode a batch of prompts (token ids).

        after: the state of an earlier run; prompts are then what follows its tokens. on_text, on_round:
        called as text and rounds come. capacity: positions of the caches, so that requests of different
        lengths share programs (default: what this one needs, in steps). Raises ConfigError before any
        work.
        """
        watched = ("streaming",) * (on_text is not None) + ("a trace",) * (on_round is not None)
        how = plan(self.pair, settings, watched)
        rows = [list(prompt) for prompt in prompts]
        self._check_context(rows, settings, after)
        clock = Clock()
        clock.seconds["load"] = self.load_seconds
        if settings.max_new_tokens == 0:
            nothing = Generation([[]], ["length"], [[]], [], [[]] if settings.logprobs else None)
            return Run([self._completion("", row, nothing, how, clock) for row in rows], None)
        self._say_window(settings.draft_window)
        if how.stepwise:
            _log.warning("stepping through the rounds from Python, for %s", ", ".join(how.stepwise))
        with jax.default_device(self.pair.device):
            how = dataclasses.replace(how, options=with_costs(self.pair, how.options, len(rows)))
            return self._run(rows, settings, how, clock, after, on_text, on_round, capacity)

    def _run(
        self,
        rows: list[list[int]],
        settings: Settings,
        how: Plan,
        clock: Clock,
        after: RoundState | None,
        on_text: OnText | None,
        on_round: OnRound | None,
        capacity: int | None,
    ) -> Run:
        models, table = self.pair.models, self.pair.target.table
        looked_up = table.seconds if table else 0.0
        _log.info("reading the prompt (the first time compiles)")
        with clock.stage("prefill"):
            state = decode.prefill(
                models,
                rows,
                how.options,
                max_new_tokens=settings.max_new_tokens,
                how=sampling(settings.temperature, settings.top_p, settings.top_k),
                seeds=[(settings.seed + b) % 2**31 for b in range(len(rows))],
                stop_ids=self.pair.target.stop_ids,
                chunk_size=settings.chunk_size,
                order=settings.prefill,
                capacity=capacity,
                draft_window=settings.draft_window,
                state=after,
            )
            jax.block_until_ready(state)
        _log.info("decoding (the first time compiles)")
        with clock.stage("decode"):
            if how.stepwise:
                texts = [RowText(self.pair.target.tokenizer, settings.stop) for _ in rows]
                state, resumable = self._step(models, state, settings, how, texts, on_text, on_round)
            else:
                texts = []
                if not bool(np.asarray(state.done).all()):  # else no round runs, so none is compiled
                    state = jax.block_until_ready(decode.generate(models, state, how.options))
                resumable = state
        if table:
            clock.seconds["embedding"] = table.seconds - looked_up
        whole = finish(state, settings.logprobs)
        completions = []
        for b, prompt in enumerate(rows):
            one = row_of(whole, b)
            if texts and texts[b].stopped:
                one = cut_at(one, texts[b].kept)
            text = texts[b].text if texts else self.pair.target.tokenizer.decode(one.tokens[0])
            completions.append(self._completion(text, prompt, one, how, clock))
        return Run(completions, resumable)

    def _step(
        self,
        models,
        state: RoundState,
        settings: Settings,
        how: Plan,
        texts: list[RowText],
        on_text: OnText | None,
        on_round: OnRound | None,
    ) -> tuple[RoundState, RoundState]:
        """Rounds until every row is done or met a stop string. Returns the last state, and the one to
        continue a conversation from: a round that went beyond a stop string is left out of it."""
        shown = [0] * len(texts)

        def show(now: RoundState) -> list[int]:
            """Rows that have just met a stop string."""
            tokens, emitted = np.asarray(now.tokens), np.asarray(now.emitted)
            for b, row in enumerate(texts):
                new = row.push(tokens[b, shown[b] : emitted[b]].tolist())
                shown[b] = int(emitted[b])
                if new and on_text:
                    on_text(b, new)
            running = ~np.asarray(now.done)
            return [b for b, row in enumerate(texts) if row.stopped and running[b]]

        state = _stopped(state, show(state))
        resumable = state
        while not bool(np.asarray(state.done).all()):
            for after, trace in stepwise.generate_stepwise(
                models, state, how.options, verify=settings.verify, bonus=settings.bonus
            ):
                if on_round:
                    on_round(state, after, trace)
                ended = show(after)
                beyond = any(row.kept < n for row, n in zip(texts, shown, strict=True))
                resumable = resumable if beyond else after
                state = after
                if ended:  # the generator holds its own state: begin again from the changed one
                    state = _stopped(state, ended)
                    break
        for b, row in enumerate(texts):
            rest = row.flush()
            if rest and on_text:
                on_text(b, rest)
        return state, resumable

    def _check_context(self, rows: list[list[int]], settings: Settings, after: RoundState | None) -> None:
        config, draft = self.pair.target.config, self.pair.draft
        past = 0 if after is None else int(np.asarray(after.target_cache.length).max()) + 1
        longest, budget = past + max(map(len, rows), default=0), settings.max_new_tokens
        if 0 < config.max_positions < longest + budget:
            raise ConfigError(
                f"{longest} prompt tokens and max_new_tokens {budget} make {longest + budget}, but the context "
                f"of {self.pair.target.source} is {config.max_positions}: shorten one of them"
            )
        slots, item = bucket(longest + budget), DTYPES[self.pair.dtype].itemsize
        needed = cache_bytes(config, len(rows), slots, item)
        if draft is not None:
            window = settings.draft_window
            seen = min(slots, window + settings.chunk_size) if window else slots
            needed += cache_bytes(draft.config, len(rows), seen, item)
        say_memory(f"caches for {len(rows)} x {slots} positions", needed, self.pair.device)

    def _say_window(self, window: int | None) -> None:
        draft = self.pair.draft
        if draft is not None and window is not None and not Ring.of(window, 1).covers(draft.config):
            _log.warning(
                "the draft sees the last %d positions (--draft-window) of what it was trained to see: the text is "
                "the same, but fewer of its candidates may be right",
                window,
            )

    def _completion(
        self, text: str, prompt: list[int], one: Generation, how: Plan, clock: Clock
    ) -> Completion:
        return Completion(
            text,
            one.tokens[0],
            prompt,
            one.finish_reasons[0],
            one,
            one.logprobs[0] if one.logprobs else None,
            how.mode,
            how.block_size,
            clock.seconds,
        )


def conversation(text: str, system: str | None = None) -> list[dict[str, str]]:
    """The messages of a first turn. Without `system` a template may add its own."""
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _stopped(state: RoundState, rows: list[int]) -> RoundState:
    """The same state with these rows done."""
    if not rows:
        return state
    reason = np.asarray(state.reason).copy()
    reason[rows] = STOP
    return dataclasses.replace(state, reason=jnp.asarray(reason))
