"""What holds for a draft's tensors in any container."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_jax.config import ConfigError, DraftConfig
from dflash_jax.weights.names import DRAFT_HF
from dflash_jax.weights.tensors import Tensor

# Names of tensors, and of metadata in GGUF, that only other models have. They would load without an error
# and then draft nonsense.
_OTHERS = (
    (re.compile(r"markov_|markov\.|dspark"), "a DSpark draft, which adds a Markov head"),
    (
        re.compile(r"(attention|mlp|attn|ffn)_conv|conv_(kernel|group)_size|selector"),
        "a DFlash 2 draft, which adds convolutions and a candidate selector",
    ),
    (
        re.compile(r"(^|\.)(d2t|t2d)(\.weight)?$"),
        "a speculators checkpoint or an EAGLE-3 draft, with a vocabulary of its own",
    ),
    (re.compile(r"attn_sinks|\.sinks$"), "a draft with attention sinks, as for gpt-oss"),
    (re.compile(r"domino"), "a Domino draft, which adds a recurrent head"),
)


def refuse_others(file: object, what: str, names: Iterable[str]) -> None:
    """ConfigError that says which model a tensor (or whatever `what` is) belongs to."""
    for name in names:
        for pattern, other in _OTHERS:
            if pattern.search(name):
                raise ConfigError(f"{file}: {what} {name} belongs to {other}: not supported as a draft")


def fusion_problems(fc: Tensor | None, config: DraftConfig) -> list[str]:
    """`fc` tells how many layers are tapped: a mismatch means that taps and weights are of two drafts."""
    expected = len(config.taps) * config.hidden_size
    if fc is None or len(fc.shape) != 2 or fc.shape[1] == expected:
        return []
    return [
        f"{fc.name} takes {fc.shape[1]} features, but {len(config.taps)} taps (target_layer_ids) of "
        f"{config.hidden_size} give {expected}"
    ]


def check_params(place: object, config: DraftConfig, flat: Mapping[str, Any]) -> None:
    """What a reader would refuse is not written: wrong layers, foreign parameters, another fusion. flat:
    {path: array}."""
    layers = {int(path.split(".")[0].removeprefix("layers_")) for path in flat if path.startswith("layers_")}
    if layers != set(range(config.num_layers)):
        raise ConfigError(
            f"{place}: the parameters have layers {sorted(layers)}, the config {config.num_layers}"
        )
    expected = (config.hidden_size, len(config.taps) * config.hidden_size)
    if "fc.weight" not in flat or tuple(flat["fc.weight"].shape) != expected:
        raise ConfigError(f"{place}: the parameters have no fc.weight of shape {list(expected)}")
    for path in flat:
        if DRAFT_HF.from_file(DRAFT_HF.to_file(path)) != path:
            raise ConfigError(f"{place}: parameter {path} is not one of a draft")
