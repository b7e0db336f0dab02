"""The model card of a draft: the README.md beside its weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.config import DraftConfig
from train.loss import default_gamma
from train.settings import Settings

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")


def text(
    config: DraftConfig,
    settings: Settings,
    evaluation: Mapping[str, Any],
    data: Mapping[str, Any],
    folder: str,
) -> str:
    """Markdown with the hub's front matter. evaluation and data: as export.write_draft has them."""
    target = config.training.target_name or settings.target
    parts = [
        _front_matter(target),
        f"# DFlash draft for {target}",
        f"A block-diffusion draft (DFlash, arXiv 2602.06036) for speculative decoding with `{target}`. In one "
        f"pass it proposes the {config.block_size - 1} tokens after the last one, from hidden states of the target "
        "and the target's own embedding and head; the target verifies them. It does nothing without that "
        "target, and with it the text is the target's own.",
        "## Target and draft",
        _table(_shapes(config, target)),
        "## Data",
        _data(settings, data),
        "## Recipe",
        _table(_recipe(config, settings)),
        "## Evaluation",
        _evaluation(config, evaluation),
        "## Use",
        _use(config, target, folder),
        "## Licence",
        "The draft learned the target's text"
        + (" and began as a copy of its last layers" if settings.model.start == "target" else "")
        + f": the licence of `{target}` decides what may be done with it. The code that trained it is Apache-2.0.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(target: str) -> str:
    lines = ["library_name: dflash-jax", "pipeline_tag: text-generation"]
    lines += ["tags:", "- speculative-decoding", "- dflash", "- draft-model"]
    if _HUB_ID.fullmatch(target):
        lines.append(f"base_model: {target.partition('@')[0]}")
    return "\n".join(["---", *lines, "---"])


def _table(rows: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _shapes(c: DraftConfig, target: str) -> dict[str, Any]:
    found = {
        "target": f"`{target}`, {c.num_target_layers} layers, {c.vocab_size:,} embedding rows",
        "target's config (sha256)": c.training.target_hash or "not recorded",
        "layers": f"{c.num_layers} of width {c.hidden_size}, MLP {c.intermediate_size}, {c.num_heads} heads over "
        f"{c.num_kv_heads} of {c.head_dim}",
        "block size": f"{c.block_size}: the anchor and {c.block_size - 1} candidates",
        "target layers it reads (0-based)": ", ".join(map(str, c.taps)),
        "mask token": c.mask_token_id,
    }
    if c.sliding_window:
        found["sliding window"] = f"{c.sliding_window}, {c.layer_types.count('sliding_attention')} layers"
    return found


def _data(settings: Settings, data: Mapping[str, Any]) -> str:
    if not data:
        return "Not recorded."
    names = {
        "files": "files",
        "conversations": "conversations read",
        "dropped": "of these dropped (no answer)",
    }
    names |= {"cut": "cut", "training": "trained on", "held_out": "held out (by prompt)"}
    names |= {"tokens": "tokens", "supervised": "of these supervised", "greedy": "greedy answers"}
    rows = {label: _show(data[key]) for key, label in names.items() if key in data}
    own = set(data.get("sources", ("",))) <= {"synthesize", "regenerate"}
    whose = (
        "whose answers the target itself gave"
        if own
        else "not all of whose answers are known to be the target's"
    )
    return f"Conversations {whose}.\n\n{_table(rows)}"


def _recipe(c: DraftConfig, settings: Settings) -> dict[str, Any]:
    o, opt, run = settings.objective, settings.optimizer, settings.run
    loss = "D-PACE"
    if o.loss == "decay":
        loss = f"cross-entropy weighted exp(-(k-1)/{default_gamma(c.block_size) if o.gamma is None else o.gamma:g})"
    found = {
        "config": f"`{settings.name}`",
        "start": f"the draft in `{run.init_from.name}`" if run.init_from else _START[settings.model.start],
        "loss": loss,
        "anchors": f"{o.anchors} blocks a conversation, {_PLACEMENT[o.placement]}",
        "optimizer": f"AdamW, rate {opt.rate:g}, betas {opt.beta1:g} and {opt.beta2:g}, decay {opt.weight_decay:g}, "
        f"clip {opt.clip:g}, {opt.warmup:.0%} warm-up, cosine",
        "length": f"{run.steps:,} steps" if run.steps else f"{run.epochs:g} epochs",
        "batch": f"{settings.data.tokens * run.accumulate:,} positions",
        "precision": f"{run.dtype} activations, float32 master weights",
    }
    if o.soft:
        found["soft labels"] = f"{o.soft:.0%} of the loss, temperature {o.soft_temperature:g}"
    if o.candidates:
        found["vocabulary"] = f"{o.candidates:,} candidates; all of it every {o.full_every} steps"
    return found


_START = {"target": "the target's last layers", "random": "random"}
_PLACEMENT = {"random": "drawn anew each time", "fixed": "at fixed places"}


def _evaluation(c: DraftConfig, found: Mapping[str, Any]) -> str:
    """Of a flat result of held_out, with `decoder` beside it where the real decoder was asked."""
    runs = found.get("decoder", {}).get("runs", [])
    if "walk" not in found and not runs:
        return "Not measured yet: `python -m train evaluate`."
    lines = ["Tau is the mean number of tokens that a round commits."]
    taus: dict[str, Any] = {}
    rows: dict[str, Sequence[float]] = {}
    if "walk" in found:
        for name, key in _TAUS.items():
            if math.isfinite(found.get(key, math.nan)):
                taus[f"held-out conversations, {name}"] = f"{found[key]:.3f}"
        rows |= {"accuracy": found["accuracy"], "recall@16": found["recall16"]}
    for one in runs:
        label = f"real decoder, {found['decoder']['prompts']}, temperature {one['temperature']:g}"
        taus[label] = f"{one['tau']:.3f} ({one['rounds']:,} rounds)"
        rows[f"accepted, temperature {one['temperature']:g}"] = one["acceptance"]
    head = ["slot", *(str(k) for k in range(1, c.block_size))]
    grid = [head, ["---"] * len(head), *([name, *(f"{x:.2f}" for x in row)] for name, row in rows.items())]
    lines += [_table(taus), "\n".join(f"| {' | '.join(row)} |" for row in grid)]
    return "\n\n".join(lines)


_TAUS = {
    "tau by the walk": "walk",
    "tau by the walk, greedy answers": "walk_greedy",
    "tau by the walk, sampled answers": "walk_sampled",
    "tau at uniform anchors (flattering)": "tau_uniform",
}


def _use(c: DraftConfig, target: str, folder: str) -> str:
    plain = target.partition("@")[0]
    speculative = json.dumps(
        {"method": "dflash", "model": folder, "num_speculative_tokens": c.block_size - 1}
    )
    return f"""`{folder}` is this folder. With dflash-jax:

```bash
python -m infer generate --target {target} --draft {folder} --prompt "..."
```

With z-lab's package (`pip install "dflash[local]"`), for targets that transformers loads:

```bash
dflash generate transformers --model {plain} --draft {folder} "..."
```

With vLLM, and with SGLang:

```bash
vllm serve {plain} --speculative-config '{speculative}'
python -m sglang.launch_server --model-path {plain} --speculative-algorithm DFLASH \\
    --speculative-draft-model-path {folder} --speculative-num-draft-tokens {c.block_size}
```"""


def _show(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(f"`{item}`" for item in value) if isinstance(value, (list, tuple)) else str(value)
