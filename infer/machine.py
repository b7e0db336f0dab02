"""What ran a measurement: the device and the versions, as every result states them."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import dflash_jax


def describe_device(device: jax.Device) -> str:
    """ "cpu:0", "gpu:0 (NVIDIA H100)": the kind where it says more than the platform."""
    name = f"{device.platform}:{device.id}"
    return name if device.device_kind.lower() == device.platform else f"{name} ({device.device_kind})"


def versions() -> dict[str, str]:
    return {
        "dflash_jax": dflash_jax.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "flax")},
    }


def hardware(device: jax.Device) -> dict[str, Any]:
    return {
        "device": describe_device(device),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": cores(),
        "system": platform.system(),
    }


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def revision() -> str | None:
    """The commit of the checkout that this runs from, "+" when files differ from it; None without one."""
    root = Path(dflash_jax.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(root), *command], capture_output=True, text=True, check=True
            ).stdout
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + "+" * bool(changes)


def _processor() -> str:
    """The CPU's name; Linux keeps it in a file, elsewhere Python may know."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
