"""What each command does with its flags."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dflash_jax import pair
from dflash_jax.compile_cache import keep_compiled
from dflash_jax.config import ConfigError, Overrides
from dflash_jax.terminal import Screen
from dflash_jax.weights.atomic import check_writable
from infer import chat, check, convert, demo, inspect, synthetic, timing
from infer.bench import run as bench
from infer.bench.arms import arms as compared
from infer.clock import Clock
from infer.datasets import find, label, numbered_prompts, read_prompts
from infer.machine import describe_device
from infer.options import (
    Bench,
    Chat,
    Check,
    Convert,
    Decoding,
    Demo,
    Generate,
    Inspect,
    Placement,
    Synthetic,
    Time,
)
from infer.output import as_json, summary
from infer.session import Session
from infer.settings import Settings, plan
from infer.trace import Trace


def run(flags: Any, screen: Screen) -> int:
    """The exit status. Raises ConfigError and FetchError."""
    keep_compiled()
    match flags:
        case Generate():
            return generate(flags, screen)
        case Chat():
            return talk(flags, screen)
        case Demo():
            return show(flags, screen)
        case Check():
            return lossless(flags, screen)
        case Time():
            return measure(flags, screen)
        case Bench():
            return compare(flags, screen)
        case Synthetic():
            return synthetic.run(flags, screen)
        case Inspect():
            screen.clear()
            return inspect.run(flags.path, flags.target)
        case Convert():
            return convert.run(flags, screen)
    raise AssertionError(flags)


def open_session(flags: Generate | Chat | Demo | Check | Time | Bench) -> Session:
    clock = Clock()
    placed = (
        {n: getattr(flags, n) for n in Placement.__dataclass_fields__} if isinstance(flags, Placement) else {}
    )
    with clock.stage("load"):
        loaded = pair.load(
            flags.target,
            flags.draft,
            dtype=flags.dtype,
            device=flags.device,
            block_size=getattr(flags, "block_size", None),
            draft_vocabulary=getattr(flags, "draft_vocabulary", None),
            **placed,
            overrides=None if isinstance(flags, Demo) else Overrides(flags.rope_theta, flags.draft_causal),
        )
    return Session(loaded, clock.seconds["load"])


def settings(flags: Decoding, **more: Any) -> Settings:
    shared = {name: getattr(flags, name) for name in Decoding.__dataclass_fields__}
    return Settings(**shared, **more)


def generate(flags: Generate, screen: Screen) -> int:
    if flags.stream and flags.json:
        raise ConfigError("--stream and --json both want standard output: choose one")
    text = read_prompt(flags)
    if flags.trace:
        check_writable(flags.trace)
    own = ("verify", "bonus", "rollback", "prefill", "logprobs")
    wanted = settings(flags, **{name: getattr(flags, name) for name in own})
    session = open_session(flags)
    trace = Trace(session.pair) if flags.trace else None

    def show(_: int, new: str) -> None:
        screen.clear()
        print(new, end="", flush=True)

    answer = session.complete(
        text,
        wanted,
        system=flags.system,
        raw=flags.raw,
        on_text=show if flags.stream else None,
        on_round=trace.on_round if trace else None,
    )
    screen.clear()
    if trace and flags.trace:
        trace.save(flags.trace, answer.prompt_tokens, answer.mode)
    if flags.json:
        print(json.dumps(as_json(session, answer), ensure_ascii=False))
        return 0
    print("" if flags.stream else answer.text, flush=True)
    if answer.logprobs is not None:
        words = session.pair.target.tokenizer
        for id, logprob in zip(answer.tokens, answer.logprobs, strict=True):
            print(f"{logprob:10.4f}  {id:7}  {words.decode([id], skip_special=False)!r}")
    print(summary(answer), file=sys.stderr)
    return 0


def read_prompt(flags: Generate) -> str:
    """ConfigError unless exactly one of --prompt and --prompt-file is given, and it is text."""
    if (flags.prompt is None) == (flags.prompt_file is None):
        raise ConfigError("give the prompt with --prompt or --prompt-file, one of them")
    if flags.prompt is not None:
        if not flags.prompt:
            raise ConfigError("the prompt is empty")
        return flags.prompt
    name = flags.prompt_file
    assert name is not None
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: the prompt cannot be read ({error.strerror})") from None
    try:
        text = data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}): a prompt is a text file"
        ) from None
    if not text:
        raise ConfigError(f"{name}: the prompt is empty")
    return text


def talk(flags: Chat, screen: Screen) -> int:
    wanted = settings(flags)
    conversation = chat.Chat(open_session(flags), wanted, flags.system)
    screen.clear()
    chat.converse(conversation)
    return 0


def show(flags: Demo, screen: Screen) -> int:
    wanted = Settings(max_new_tokens=flags.max_new_tokens, block_size=flags.block_size)
    return demo.run(open_session(flags), wanted, screen)


def lossless(flags: Check, screen: Screen) -> int:
    if min(flags.batch, flags.max_samples, flags.max_new_tokens, len(flags.temperatures)) < 1:
        raise ConfigError("batch, max_samples and max_new_tokens must be positive, temperatures not empty")
    if flags.out:
        check_writable(flags.out)
    texts = read_prompts(flags.prompts, flags.max_samples)
    session = open_session(flags)
    if session.pair.draft is None:
        draft = pair.random_draft(session.pair.target, block_size=flags.block_size or demo.BLOCK)
        session = Session(session.pair.with_draft(draft))
    loaded = session.pair
    prompts = [tokens for text in texts if len(tokens := session.prompt(text)) <= flags.max_prompt_tokens]
    if not prompts:
        raise ConfigError(f"{flags.prompts}: no prompt has at most {flags.max_prompt_tokens} tokens")
    options = plan(loaded, Settings(block_size=flags.block_size, mode="chain", policy="fixed")).options
    modes = check.plain_modes(options)
    if flags.every_mode:
        modes = check.every_mode(options, loaded.target.config, flags.tree_budget)
    checker = check.Checker(loaded.models, prompts, modes, loaded.target.stop_ids, flags.max_new_tokens)
    assert loaded.draft is not None
    title = (
        f"target {loaded.target.source}, draft {loaded.draft.source}, block {options.largest}, {loaded.dtype} "
        f"on {describe_device(loaded.device)}, {flags.max_new_tokens} new tokens"
    )
    screen.clear()
    return check.run(checker, flags.temperatures, flags.batch, flags.out, title)


def measure(flags: Time, screen: Screen) -> int:
    sizes = (*flags.block_sizes, *flags.tree_budgets, len(flags.block_sizes))
    if min(flags.repeats, flags.prompt_tokens, flags.new_tokens - 1, *sizes) < 1:
        raise ConfigError(
            "repeats, prompt_tokens, block and tree sizes must be positive, new_tokens at least 2"
        )
    if flags.out:
        check_writable(flags.out)
    session = open_session(flags)
    loaded = session.pair
    largest, context = max(flags.block_sizes), loaded.target.config.max_positions
    longest = flags.prompt_tokens + max(flags.new_tokens, 64) + largest
    if 0 < context < longest:
        raise ConfigError(
            f"prompt_tokens, new_tokens and the largest block make {longest} positions, the context of "
            f"{loaded.target.source} has {context}"
        )
    if loaded.draft is None or loaded.draft.config.block_size < largest:
        loaded = loaded.with_draft(pair.random_draft(loaded.target, block_size=max(2, largest)))
    return timing.run(loaded, flags, screen)


def compare(flags: Bench, screen: Screen) -> int:
    counts = (flags.max_samples, flags.max_new_tokens - 1, flags.repeats, len(flags.dataset))
    if min(counts) < 1:
        raise ConfigError(
            "max_samples and repeats must be positive, max_new_tokens at least 2, dataset not empty"
        )
    shared = (
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "tree_chain_seed",
        "tree_temperature",
    )
    wanted = Settings(**{name: getattr(flags, name) for name in shared})
    texts = {label(name): numbered_prompts(find(name), flags.max_samples) for name in flags.dataset}
    if len(texts) < len(flags.dataset):
        raise ConfigError(f"--dataset names one of {', '.join(texts)} twice: each is measured once")
    session = open_session(flags)
    arms = compared(session.pair, flags.compare, flags.block_sizes, flags.tree_budgets, wanted)
    asked = [
        bench.prompts(session, name, lines, flags.max_prompt_tokens, flags.raw)
        for name, lines in texts.items()
    ]
    return bench.run(
        session.pair, arms, asked, wanted, flags.repeats, flags.out, screen, with_stages=flags.stages
    )
