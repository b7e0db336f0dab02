"""A completion as the JSON object of `--json`, and as a line for people."""

from __future__ import annotations

import math
from typing import Any

from infer.machine import describe_device, versions
from infer.session import Completion, Session
from infer.text import counted


def as_json(session: Session, answer: Completion) -> dict[str, Any]:
    """tokens, prompt_tokens: ids. committed: tokens of each round; tau: their mean, null without rounds.
    tokens_per_second: of decoding. seconds: see infer/clock.py."""
    pair, stats = session.pair, answer.stats
    device = describe_device(pair.device)
    if pair.draft_device is not None and pair.models.apart:
        device += f", draft on {describe_device(pair.draft_device)}"
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "prompt_tokens": answer.prompt_tokens,
        "finish_reason": answer.finish_reason,
        "rounds": len(stats.sizes),
        "committed": stats.committed[0],
        "tau": None if math.isnan(stats.tau) else stats.tau,
        "acceptance_by_position": stats.acceptance_by_position(),
        "seconds": answer.seconds,
        "tokens_per_second": answer.tokens_per_second,
        "dtype": pair.dtype,
        "device": device,
        "mode": answer.mode,
        "block_size": answer.block_size,
        "target": pair.target.source,
        "draft": pair.draft.source if pair.draft else None,
        "draft_vocabulary": pair.models.choices if pair.draft else None,
        "versions": versions(),
        **({} if answer.logprobs is None else {"logprobs": answer.logprobs}),
    }


def summary(answer: Completion) -> str:
    """One line for stderr."""
    stats, seconds = answer.stats, answer.seconds
    parts = [f"{counted(len(answer.tokens), 'token')} ({answer.finish_reason})"]
    if answer.tokens_per_second:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if answer.mode == "ar":
        parts.append("autoregressive")
    elif stats.sizes:
        parts.append(f"{counted(len(stats.sizes), 'round')}, {stats.tau:.2f} tokens per round")
    parts.append(", ".join(f"{stage} {took:.2f}" for stage, took in seconds.items()) + " s")
    return "; ".join(parts)
