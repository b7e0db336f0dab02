"""Shapes and types of `dflash_jax` checked at every call, in tests only (jaxtyping + beartype).

Functions, methods, configs and Flax modules are checked. The constructors of pytrees are not: JAX rebuilds
a pytree around whatever it maps over (None, axis numbers, shapes, arrays with one more axis under vmap and
scan), and `flax.struct.dataclass` does that through `__init__`. A pytree's fields are arrays that some
function took or returned, so little is lost.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
from jaxtyping import install_import_hook


def install(package: str) -> None:
    """Check `package` from now on. It must not have been imported yet."""
    flax.struct.dataclass = _without_constructor_check(flax.struct.dataclass)
    install_import_hook(package, "beartype.beartype")


def _without_constructor_check(dataclass: Any) -> Any:
    """`dataclass` whose classes carry the mark of `typing.no_type_check`, which jaxtyping's hook respects.
    The mark as a decorator in the library would say the same, but also blind mypy and skip the methods."""

    @functools.wraps(dataclass)
    def unchecked(cls: Any = None, **options: Any) -> Any:
        if cls is None:
            return functools.partial(unchecked, **options)
        made = dataclass(cls, **options)
        made.__no_type_check__ = True
        return made

    return unchecked
