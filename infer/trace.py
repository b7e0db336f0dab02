"""What each round saw, as JSON: `generate --trace FILE.json`, to look inside a decoder that went wrong.

    {"target", "draft", "mode", "prompt": [token...], "first": token,
     "rounds": [{"row", "round", "size", "anchor", "candidates", "parents", "choices", "path", "kept"}...]}

A token is {"id", "text"}. candidates[i] is node i + 1 of the block and follows node parents[i] (in a chain,
i); choices[i] is the target's token after node i. So candidate i is accepted when it equals
choices[parents[i]] and that node is on the path too. path: accepted nodes, the anchor (0) first. kept: tokens
that the round emitted, what a stop token or the budget cut left out. round is null for the extra forward of
an explicit bonus.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.pair import Pair
from dflash_jax.state import RoundState, RoundTrace
from dflash_jax.weights.atomic import replacing


class Trace:
    """Collects rounds; pass `on_round` to Session.run."""

    def __init__(self, pair: Pair):
        self._pair = pair
        self._rounds: list[dict[str, Any]] = []
        self._first: list[int] = []

    def token(self, id: int) -> dict[str, Any]:
        return {"id": id, "text": self._pair.target.tokenizer.decode([id], skip_special=False)}

    def on_round(self, before: RoundState, after: RoundState, trace: RoundTrace) -> None:
        if not self._first:
            self._first = np.asarray(before.tokens)[:, 0].tolist()
        anchors, rounds = np.asarray(before.anchor), int(before.rounds)
        counted = int(after.rounds) > rounds
        block, seen, kept = jax.device_get((trace.block, trace.acceptance, trace.kept))
        for row in range(len(kept)):
            if not kept[row]:  # the row was done
                continue
            size = int(block.valid[row].sum())
            tokens = [self.token(id) for id in block.tokens[row, :size].tolist()]
            self._rounds.append(
                {
                    "row": row,
                    "round": rounds if counted else None,
                    "size": size,
                    "anchor": self.token(int(anchors[row])),
                    "candidates": tokens[1:],
                    "parents": block.parents[row, 1:size].tolist(),
                    "choices": [self.token(id) for id in seen.choices[row, :size].tolist()],
                    "path": seen.path[row, : seen.count[row]].tolist(),
                    "kept": int(kept[row]),
                }
            )

    def save(self, path: Path, prompt: Sequence[int], mode: str) -> None:
        """ConfigError when the file cannot be written."""
        draft = self._pair.draft
        whole = {
            "target": self._pair.target.source,
            "draft": draft.source if draft else None,
            "mode": mode,
            "prompt": [self.token(id) for id in prompt],
            "first": self.token(self._first[0]) if self._first else None,
            "rounds": self._rounds,
        }
        with replacing(path) as file:
            file.write((json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode())
