"""The rules that hold the code together, as functions of source text: one sentence per offence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

PACKAGES = ("dflash_jax", "train", "infer")
MAX_LINES = 500

# A module may import those on its left only, and within its own subpackage what it likes. Models know
# nothing of files and files nothing of models: they meet in `pair`.
MODELS = (
    "config numerics < block < cache < layers gated_delta moe < targets drafts < sampling policy < tree < "
    "buckets embedding < state < generation prefill placement < rounds < decode < stepwise"
)
FILES = (
    "config < weights < vocabulary chat_template streaming tables < shortnames < fetch < sources < tokenizer"
)
# Above both chains; train and infer are above the whole library, and strangers to each other.
LIBRARY = "journal plain_json pair testing terminal command_line compile_cache"

# A second place that compiles is a second place to look for retraces and donated buffers.
JIT_FILES = ("dflash_jax/decode.py", "train/step.py")
COMPILERS = ("jit", "pjit", "pmap")

# Only what compares us with PyTorch loads it.
TORCH = ("torch", "transformers", "dflash")
TORCH_PLACES = ("tests/parity/", "infer/bench", "infer/peers", "train/peers")


def _allowed() -> dict[str, set[str]]:
    """For each module of dflash_jax, the modules that it may import."""
    below: dict[str, set[str]] = {}
    for chain in (MODELS, FILES):
        seen: set[str] = set()
        for rank in chain.split(" < "):
            names = set(rank.split())
            below.update({name: set(seen) for name in names})
            seen |= names
    library = set(below)
    below.update({name: library for name in LIBRARY.split()})
    return below


ALLOWED = _allowed()


def room(module: str) -> str:
    """The name that the order knows a module by: 'dflash_jax.targets.llama' -> 'targets', 'infer.bench' ->
    'infer', 'dflash_jax' (the package's own file) -> ''."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "dflash_jax" else package


def module_name(path: str) -> str:
    """'dflash_jax/targets/__init__.py' -> 'dflash_jax.targets'."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports, inside functions too. `from a import b` gives
    'a.b', as b may be a module."""
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, node.module] if node.module else base)
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def import_order(path: str, source: str) -> list[str]:
    """Imports of our own modules that do not point down."""
    here = room(module_name(path))
    if path.startswith("dflash_jax/") and here and here not in ALLOWED:
        return [f"{path}: '{here}' has no place in the order: give it one in tests/structure.py"]
    offences = []
    for line, name in imports(path, ast.parse(source)):
        if name.partition(".")[0] not in PACKAGES or name == "dflash_jax.__version__":
            continue
        there = room(name)
        if there == here:
            continue
        if path.startswith("dflash_jax/"):
            fine = there in ALLOWED.get(here, ())
        else:
            fine = name.startswith("dflash_jax")
        if not fine:
            offences.append(f"{path}:{line}: {here or 'dflash_jax'} imports {name}, which is not below it")
    return offences


def compilation(path: str, source: str) -> list[str]:
    """Uses of a compiling transformation (`jax.jit`, `nn.jit`, `from jax import jit`) outside JIT_FILES."""
    if path in JIT_FILES:
        return []
    tree = ast.parse(source)
    lines = [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in COMPILERS
    ]
    lines += [line for line, name in imports(path, tree) if name.rpartition(".")[2] in COMPILERS]
    return [f"{path}:{line}: compiles; only {' and '.join(JIT_FILES)} do" for line in sorted(lines)]


def torch_imports(path: str, source: str) -> list[str]:
    """Imports of PyTorch, transformers or the reference outside the places that compare with them."""
    if path.startswith(TORCH_PLACES):
        return []
    return [
        f"{path}:{line}: imports {name}; only {', '.join(TORCH_PLACES)} may"
        for line, name in imports(path, ast.parse(source))
        if name.partition(".")[0] in TORCH
    ]


def size(path: str, source: str) -> list[str]:
    """Files that have grown a second reason to exist."""
    count = len(source.splitlines())
    return [f"{path}: {count} lines, over {MAX_LINES}: one reason per file"] if count > MAX_LINES else []
