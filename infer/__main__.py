"""python -m infer COMMAND"""

from __future__ import annotations

import sys

from dflash_jax.command_line import guarded
from infer.parse import parse


def run(arguments: list[str]) -> int:
    flags = parse(arguments)
    # After the flags are known to be good: JAX starts here.
    from dflash_jax.terminal import Screen
    from infer import commands

    with Screen(flags.debug) as screen:
        return commands.run(flags, screen)


def main(arguments: list[str] | None = None) -> int:
    return guarded(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
