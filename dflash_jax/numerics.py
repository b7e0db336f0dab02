"""How numbers are multiplied: float32 operands exactly (a GPU's default for float32 is TF32), and every sum in
float32."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def precision(x: Array) -> lax.Precision:
    """For a product with x."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def contract(equation: str, a: Array, b: Array) -> Array:
    """einsum with a float32 result, exact for float32 operands."""
    return jnp.einsum(equation, a, b, precision=precision(a), preferred_element_type=jnp.float32)
