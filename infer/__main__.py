"""python -m infer COMMAND: exit status 0, 2 for bad input, 1 for a failure; errors are one sentence."""

from __future__ import annotations

import sys

from dflash_jax.config import ConfigError
from infer.parse import parse

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        flags = parse(arguments)
        # After the flags are known to be good: JAX starts here.
        from infer import commands
        from infer.terminal import Screen

        with Screen(flags.debug) as screen:
            return commands.run(flags, screen)
    except ConfigError as error:
        return _fail(error, BAD_INPUT, arguments)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        sys.stdout = None  # its flush at exit would fail again
        return FAILURE
    except Exception as error:  # a failed download, a full disk, no memory on the device
        return _fail(error, FAILURE, arguments)


def _fail(error: Exception, status: int, arguments: list[str]) -> int:
    if "--debug" in arguments:
        import traceback

        traceback.print_exception(error)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Our own errors are sentences; of others, the class tells as much as the text.
    ours = status == BAD_INPUT or type(error).__module__.startswith("dflash_jax")
    sentence = lines[0] if ours else f"{type(error).__name__}: {lines[0]} (--debug shows where)"
    print(f"error: {sentence}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
