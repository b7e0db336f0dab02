"""Draft models."""

from dflash_jax.drafts.dflash import DFlash, abstract_params, init_params

__all__ = ["DFlash", "abstract_params", "init_params"]
