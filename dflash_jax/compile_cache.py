"""XLA's persistent cache of compiled programs, on by default in the programs."""

from __future__ import annotations

import jax

from dflash_jax.fetch import cache_folder


def keep_compiled() -> None:
    """Compiled programs stay in the user's cache folder, so that a second start is warm. The key of an
    entry holds the program, the versions, the flags and the machine. JAX_COMPILATION_CACHE_DIR, as
    everywhere in JAX, names another folder."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        folder = cache_folder() / "xla"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return  # a read-only home: everything works, each start compiles
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
