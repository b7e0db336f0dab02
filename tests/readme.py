"""The commands of README.md and docs/, executed: `python tests/readme.py STAGE` runs the blocks of one stage in order,
the README's first.

Every ```bash and ```python block follows a comment, which a reader of the rendered page does not see:

    <!-- run: test -->                             a block of the stage `test`
    <!-- run: use; 256 -> 16; gsm8k -> tiny -->    with these texts replaced: each must occur in the block
    <!-- not run: needs a GPU -->                  and why

so that a block is executed as it is written, or at a size that fits a test, or not at all for a reason. Commands stand
in bash blocks only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
STAGES = ("install", "test", "parity", "use")
RUN = {"bash": ("bash", "-euo", "pipefail", "-c"), "python": (sys.executable, "-c")}

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_COMMAND = re.compile(r"^(\$ |python3? -m |pip |pytest |make |mkdocs )", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """stage: one of STAGES, None when the block is not to be run. code: what runs, replacements made."""

    stage: str | None
    code: str
    language: str = "bash"


def blocks(text: str, page: str = "README.md") -> list[Block]:
    """All bash and Python blocks of a Markdown text. Raises ValueError for one without a mark, with an unknown mark,
    or with a replacement that replaces nothing, and for commands in another kind of block."""
    found = []
    for match in _BLOCK.finditer(text):
        mark, language, code = match["mark"] or "", match["language"], match["code"]
        where = f"{page}:{text.count(chr(10), 0, match.start('code'))}"
        if language not in RUN:
            if _COMMAND.search(code):
                raise ValueError(f"{where}: commands need a bash block, and a mark")
            continue
        if mark.startswith("not run: "):
            found.append(Block(None, code, language))
            continue
        stage, *changes = mark.removeprefix("run: ").split("; ")
        if not mark.startswith("run: ") or stage not in STAGES:
            raise ValueError(
                f"{where}: the {language} block needs '<!-- run: STAGE -->' or '<!-- not run: WHY -->'"
            )
        for change in changes:
            old, arrow, new = change.partition(" -> ")
            if not arrow or old not in code:
                raise ValueError(f"{where}: '{change}' replaces nothing in the block")
            code = code.replace(old, new)
        found.append(Block(stage, code, language))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stage", choices=STAGES)
    stage = parser.parse_args().stage
    for page in PAGES:
        for block in blocks(page.read_text(), page.name):
            if block.stage != stage:
                continue
            print("".join(f"$ {line}\n" for line in block.code.splitlines()), end="", flush=True)
            start = time.perf_counter()
            code = subprocess.run([*RUN[block.language], block.code], cwd=ROOT).returncode
            print(f"  {page.name}: exit {code} after {time.perf_counter() - start:.1f} s", flush=True)
            if code:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
