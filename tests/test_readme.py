"""README.md says of each of its commands whether CI runs it."""

from __future__ import annotations

import pytest
import readme


def test_readme_is_executable() -> None:
    stages = {block.stage for block in readme.blocks(readme.README.read_text())}
    assert stages >= {"install", "test", "parity", "use"}


def test_blocks_come_in_order_with_their_replacements() -> None:
    text = (
        "# A\n\n<!-- run: test -->\n```bash\npytest\n```\n\n```python\nimport os\n```\n\n"
        "<!-- run: use; --max 100 -> --max 2 -->\n```bash\nbench --max 100\nls\n```\n\n"
        "<!-- not run: makes an environment -->\n```bash\npython3 -m venv .venv\n```\n"
    )
    assert readme.blocks(text) == [
        readme.Block("test", "pytest\n"),
        readme.Block("use", "bench --max 2\nls\n"),
        readme.Block(None, "python3 -m venv .venv\n"),
    ]


@pytest.mark.parametrize(
    "mark",
    [
        "",  # no mark
        "<!-- run -->\n",
        "<!-- run: tests -->\n",
        "<!-- run: test -->\n\n",  # not on the line above
        "<!-- run: use; --max 100 -> --max 2 -->\n",  # the command has changed since
        "<!-- run: use; ls -->\n",
    ],
)
def test_block_without_a_usable_mark_is_an_error(mark: str) -> None:
    with pytest.raises(ValueError, match=r"README\.md:\d+"):
        readme.blocks(f"text\n\n{mark}```bash\nls\n```\n")
