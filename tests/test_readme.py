"""README.md and docs/ say of each of their commands whether CI runs it."""

from __future__ import annotations

import pytest
import readme


def test_every_page_is_executable() -> None:
    stages = {
        page.name: {block.stage for block in readme.blocks(page.read_text(), page.name)}
        for page in readme.PAGES
    }
    assert stages["README.md"] >= {"install", "test", "parity", "use"}
    assert "use" in stages["tutorial.md"] and not stages["concepts.md"]


def test_blocks_come_in_order_with_their_replacements() -> None:
    text = (
        "# A\n\n<!-- run: test -->\n```bash\npytest\n```\n\n```text\nls\n```\n\n"
        "<!-- run: use; --max 100 -> --max 2 -->\n```bash\nbench --max 100\nls\n```\n\n"
        "<!-- not run: makes an environment -->\n```bash\npython3 -m venv .venv\n```\n"
        "<!-- run: use; 1 -> 2 -->\n```python\nprint(1)\n```\n"
    )
    assert readme.blocks(text) == [
        readme.Block("test", "pytest\n"),
        readme.Block("use", "bench --max 2\nls\n"),
        readme.Block(None, "python3 -m venv .venv\n"),
        readme.Block("use", "print(2)\n", "python"),
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
    for language in readme.RUN:
        with pytest.raises(ValueError, match=r"page\.md:\d+: "):
            readme.blocks(f"text\n\n{mark}```{language}\nls\n```\n", "page.md")


@pytest.mark.parametrize("language", ["", "text", "console"])
def test_commands_hide_in_no_other_block(language: str) -> None:
    with pytest.raises(ValueError, match=r"page\.md:2: commands need a bash block"):
        readme.blocks(f"\n```{language}\nwords\npython -m infer demo\n```\n", "page.md")
