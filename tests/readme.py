"""The README's commands, executed: `python tests/readme.py STAGE` runs the blocks of one stage in order.

Every ```bash block of README.md follows a comment, which a reader of the rendered page does not see:

    <!-- run: test -->                             a block of the stage `test`
    <!-- run: use; 256 -> 16; gsm8k -> tiny -->    with these texts replaced: each must occur in the block
    <!-- not run: needs a GPU -->                  and why

so that a command is executed as it is written, or at a size that fits a test, or not at all for a reason.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
STAGES = ("install", "test", "parity", "use")

_BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```bash\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """stage: one of STAGES, None when the block is not to be run. code: what runs, replacements made."""

    stage: str | None
    code: str


def blocks(text: str) -> list[Block]:
    """All bash blocks of a Markdown text. Raises ValueError for one without a mark, with an unknown mark, or
    with a replacement that replaces nothing."""
    found = []
    for match in _BLOCK.finditer(text):
        mark, code = match["mark"] or "", match["code"]
        where = f"README.md:{text.count(chr(10), 0, match.start('code'))}"
        if mark.startswith("not run: "):
            found.append(Block(None, code))
            continue
        stage, *changes = mark.removeprefix("run: ").split("; ")
        if not mark.startswith("run: ") or stage not in STAGES:
            raise ValueError(
                f"{where}: the bash block needs '<!-- run: STAGE -->' or '<!-- not run: WHY -->'"
            )
        for change in changes:
            old, arrow, new = change.partition(" -> ")
            if not arrow or old not in code:
                raise ValueError(f"{where}: '{change}' replaces nothing in the block")
            code = code.replace(old, new)
        found.append(Block(stage, code))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stage", choices=STAGES)
    stage = parser.parse_args().stage
    for block in blocks(README.read_text()):
        if block.stage != stage:
            continue
        print("".join(f"$ {line}\n" for line in block.code.splitlines()), end="", flush=True)
        start = time.perf_counter()
        code = subprocess.run(["bash", "-euo", "pipefail", "-c", block.code], cwd=README.parent).returncode
        print(f"  exit {code} after {time.perf_counter() - start:.1f} s", flush=True)
        if code:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
