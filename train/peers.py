"""SpecForge's DFlash training step (PyPI `specforge==0.2.0`, PyTorch), for the comparison of `train.timing`.

Only its model and objective are imported: the packages around them load inference servers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_jax.config import ConfigError, DraftConfig

_PACKAGES = (
    "specforge", "specforge.modeling", "specforge.modeling.draft", "specforge.algorithms",
    "specforge.algorithms.common", "specforge.core",
)  # fmt: skip


def specforge_step(config: DraftConfig, sequences: int, length: int, anchors: int) -> Callable[[], None]:
    """One update (forward, backward, clip, AdamW) of its DFlash model, dense mask (sdpa), features given,
    on arbitrary tokens. Raises ConfigError where it is not installed."""
    try:
        import torch
        from transformers import Qwen3Config
    except ImportError:
        raise ConfigError("the comparison needs torch and transformers: install the extra `parity`") from None
    _without_servers()
    model = importlib.import_module("specforge.modeling.draft.dflash").DFlashDraftModel
    objective = importlib.import_module("specforge.algorithms.common.dflash_family_model").OnlineDFlashModel

    torch.manual_seed(0)
    shape = Qwen3Config(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
    )
    shape._attn_implementation = "sdpa"
    shape.block_size = config.block_size
    shape.num_target_layers = config.num_target_layers
    shape.dflash_config = {"target_layer_ids": list(config.taps), "mask_token_id": config.mask_token_id}
    head: Any = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False).requires_grad_(False)
    table: Any = torch.nn.Embedding(config.vocab_size, config.hidden_size, _weight=head.weight)
    draft = model(shape).train()
    step = objective(
        draft,
        head,
        table.requires_grad_(False),
        config.mask_token_id,
        block_size=config.block_size,
        attention_backend="sdpa",
        num_anchors=anchors,
        loss_decay_gamma=4.0,
    )
    optimizer = torch.optim.AdamW(draft.parameters(), lr=6e-4)
    tokens = torch.randint(4, config.vocab_size, (sequences, length))
    features = torch.randn(sequences, length, len(config.taps) * config.hidden_size)
    supervised = torch.ones(sequences, length)

    def update() -> None:
        loss = step(tokens, features, supervised)[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def _without_servers() -> None:
    """Stand in for the packages' own files, which import SGLang and more."""
    found = importlib.util.find_spec("specforge")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("the comparison needs SpecForge: pip install --no-deps specforge==0.2.0")
    root = Path(next(iter(found.submodule_search_locations)))
    for name in _PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
