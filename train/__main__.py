"""python -m train COMMAND --config configs/NAME.toml [--section.key value ...]"""

from __future__ import annotations

import sys

from dflash_jax.command_line import guarded
from train.parse import parse


def run(arguments: list[str]) -> int:
    request = parse(arguments)
    # After the flags are known to be good: JAX starts here.
    from dflash_jax.terminal import Screen
    from train import commands

    with Screen(request.debug) as screen:
        return commands.run(request, screen)


def main(arguments: list[str] | None = None) -> int:
    return guarded(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
