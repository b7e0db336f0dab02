"""The rules of tests/structure.py hold for this repository, and each of them can fail."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from structure import JIT_FILES, PACKAGES, compilation, import_order, size, torch_imports

ROOT = Path(__file__).parent.parent


def sources(*folders: str) -> dict[str, str]:
    """{path relative to the repository: text} of every Python file of these folders."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


@pytest.mark.parametrize(
    ("rule", "folders"),
    [
        (import_order, PACKAGES),
        (compilation, PACKAGES),
        (torch_imports, (*PACKAGES, "tests")),
        (size, (*PACKAGES, "tests")),
    ],
)
def test_repository_keeps(rule: Callable[[str, str], list[str]], folders: tuple[str, ...]) -> None:
    found = sources(*folders)
    assert "dflash_jax/config.py" in found, "looked in the wrong place"
    offences = [offence for path, source in found.items() for offence in rule(path, source)]
    assert not offences, "\n" + "\n".join(offences)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_config_parses(path: Path) -> None:
    assert tomllib.loads(path.read_text())


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dflash_jax/block.py", "from dflash_jax.cache import commit"),
        ("dflash_jax/block.py", "import dflash_jax.cache"),
        ("dflash_jax/block.py", "from dflash_jax import cache"),
        ("dflash_jax/block.py", "from . import cache"),
        ("dflash_jax/block.py", "from .cache import commit"),
        ("dflash_jax/block.py", "def f():\n    from dflash_jax import decode"),
        ("dflash_jax/targets/llama.py", "from ..decode import prefill"),
        ("dflash_jax/targets/__init__.py", "from ..decode import prefill"),
        ("dflash_jax/targets/llama.py", "from dflash_jax.drafts import dflash"),
        ("dflash_jax/weights/hf.py", "from dflash_jax import targets"),
        ("dflash_jax/decode.py", "from dflash_jax.tokenizer import Tokenizer"),
        ("dflash_jax/pair.py", "import infer.session"),
        ("dflash_jax/__init__.py", "from dflash_jax import decode"),
        ("dflash_jax/attic.py", ""),
        ("train/loop.py", "from infer import session"),
        ("infer/bench.py", "import train"),
    ],
)
def test_import_order_refuses(path: str, source: str) -> None:
    assert len(import_order(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dflash_jax/cache.py", "from dflash_jax.block import Block\nimport jax"),
        ("dflash_jax/targets/llama.py", "from .decoder import Decoder\nfrom ..layers import attend"),
        ("dflash_jax/targets/__init__.py", "from . import llama\nfrom .qwen3 import Qwen3"),
        ("dflash_jax/tokenizer.py", "from dflash_jax.weights.gguf_file import read_file"),
        ("dflash_jax/pair.py", "from dflash_jax import drafts, targets, tokenizer, weights"),
        (
            "train/loop.py",
            "from dflash_jax.pair import load\nfrom . import data\nimport train.step",
        ),
        ("infer/session.py", "from dflash_jax import __version__, decode"),
    ],
)
def test_import_order_permits(path: str, source: str) -> None:
    assert import_order(path, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import jax\nf = jax.jit(g)",
        "from functools import partial\nimport jax\n@partial(jax.jit, static_argnums=0)\ndef f(x): ...",
        "from jax import jit as compile",
        "import flax.linen as nn\nclass A:\n    f = nn.jit(g)",
        "from jax.experimental.pjit import pjit",
    ],
)
def test_compilation_has_two_files(source: str) -> None:
    assert compilation("dflash_jax/layers.py", source)
    assert not any(compilation(path, source) for path in JIT_FILES)


@pytest.mark.parametrize(
    "source", ["import torch.nn", "def f():\n    from transformers import AutoModel", "import dflash"]
)
def test_torch_stays_outside(source: str) -> None:
    assert torch_imports("dflash_jax/weights/hf.py", source)
    assert torch_imports("tests/test_weights.py", source)
    assert not torch_imports("tests/parity/test_targets.py", source)
    assert not torch_imports("dflash_jax/weights/hf.py", "import dflash_jax\nfrom dflash_jax import drafts")


def test_files_stay_small() -> None:
    assert not size("dflash_jax/a.py", "x = 1\n" * 500)
    assert size("dflash_jax/a.py", "x = 1\n" * 501)
