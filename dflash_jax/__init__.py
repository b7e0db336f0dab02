"""DFlash block-diffusion speculative decoding in JAX.

Import what you need from the module that owns it (`from dflash_jax import decode`): this file loads
nothing, so that `import dflash_jax` costs no start of JAX.
"""

__version__ = "0.1.0"
