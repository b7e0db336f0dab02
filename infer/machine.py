"""What ran a measurement: the device and the versions, as every result states them."""

from __future__ import annotations

import platform
from importlib.metadata import version

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
