"""Answers that are not the autoregressive answer, each explained (infer/lossless.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from infer.bench.arms import AR
from infer.bench.measure import Bench, Prompt, Record
from infer.lossless import Divergence, divergences


def differences(bench: Bench, prompts: Sequence[Prompt], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every record that differs from the first autoregressive one of its prompt: where from, the fields of its
    Divergence, and whether it is suspicious.

    Looking into one costs a forward of the target, and most arms fall on the same side of the same near-tie:
    each (prompt, answer) is looked into once."""
    asked = {(prompt.dataset, prompt.line): prompt for prompt in prompts}
    expected = {(r.dataset, r.line): r.tokens for r in records if r.arm == AR and not r.repeat}
    known: dict[tuple, Divergence] = {}
    found = []
    for record in records:
        at = record.dataset, record.line
        if record.tokens == expected[at]:
            continue
        key = (*at, tuple(record.tokens))
        if key not in known:
            prompt = asked[at]
            (known[key],) = divergences(
                bench.pair.models, [prompt.tokens], [expected[at]], [record.tokens], bench.how,
                [bench.seed_of(prompt)],
            )  # fmt: skip
        where = {name: getattr(record, name) for name in ("dataset", "line", "arm", "repeat")}
        what = {name: value for name, value in asdict(known[key]).items() if name not in ("row", "near_tie")}
        found.append({**where, **what, "suspicious": not known[key].near_tie})
    return found


def count(found: Sequence[dict[str, Any]]) -> dict[str, int]:
    suspicious = sum(difference["suspicious"] for difference in found)
    return {"differ": len(found), "near_ties": len(found) - suspicious, "suspicious": suspicious}
