"""How the tests run: on 8 virtual CPU devices, with every implicit conversion of JAX an error.

The order of this file matters: the environment is read when JAX starts, and the import hook sees only
modules that are imported after it. Nothing above the hook may import `dflash_jax`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX_PLATFORMS=cuda runs the same tests on a GPU
# Sharded training is tested without hardware. Unused devices are free: 23 s of tiny compiles took 23 s
# with 1 device and with 8.
# And a compiler that tries less: compiling is nine tenths of the tests' time, and what it makes runs for a
# moment. Without optimisation and with the older way of emitting fusions a program takes a quarter of its
# time. (What users run is compiled as for users in the commands of the README, which `.ci/run` executes, and
# which compare tokens.)
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false"
    + " --xla_cpu_parallel_codegen_split_count=4"  # 32 parts are for programs that take minutes
)
import jax
import pytest
import shape_check
from hypothesis import settings

shape_check.install("dflash_jax")

# A silent bf16 -> f32 promotion or a [B, 1] against [B, T] broadcast is a bug that only shows as a slow or
# slightly different number: make both an error.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiled programs of earlier runs: the 23 s above are 4 s. The key holds the program, the versions, the
# flags and the features of the CPU, so a stale or foreign entry is never loaded.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-jax" / "xla-tests"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Few examples, as most of them compile; the same ones on every run of CI, so that a red run is the commit's.
settings.register_profile("tests", max_examples=20, deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("tests"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/parity imports torch: stay out unless `-m` names it. (A path on the command line goes in
    whatever this says.)"""
    return True if collection_path.name == "parity" and "parity" not in config.option.markexpr else None


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Tests of tests/parity are marked by their place, so that none can forget."""
    for item in items:
        if "parity" in item.path.parent.parts:
            item.add_marker(pytest.mark.parity)


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_do_not_pile_up():
    """Every program that XLA compiles for a CPU holds memory maps, and a process may have 65,530 of them
    (vm.max_map_count): the whole suite in one process ran into that and ended in a segmentation fault.
    What another file compiled comes back from the cache on disk."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: $DFLASH_SMOLLM2_GGUF, or the copy in the user's cache, which
    the first use downloads. Tests that ask for it carry the marker `model`."""
    given = os.environ.get("DFLASH_SMOLLM2_GGUF")
    if given:
        path = Path(given)
        assert path.is_file(), f"DFLASH_SMOLLM2_GGUF names {path}, which is not a file"
        return path
    from dflash_jax import pair

    return Path(pair.smollm2_gguf())
