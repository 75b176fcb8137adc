"""The code of the documentation: blocks between fences, and the comment above each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
_BLOCK = re.compile(
    r"^(?:<!-- (?P<comment>.*) -->\n)?(?P<fence>```+)(?P<language>.*)\n(?P<code>(?:.*\n)*?)(?P=fence)$",
    re.M,
)


@dataclass(frozen=True)
class Block:
    """A block of code; `comment` is what stands in ``<!-- -->`` on the line above it."""

    page: Path
    line: int
    language: str
    code: str
    comment: str

    @property
    def file(self) -> str:
        """The name of the file that the reader is to write, or "": ``<!-- file: NAME -->``."""
        return self.comment.partition("file: ")[2]

    @property
    def commands(self) -> list[str]:
        """What the reader types into a shell."""
        return [line[2:] for line in self.code.splitlines() if line.startswith("$ ")]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path | str, *languages: str) -> list[Block]:
    """The blocks of a page, all or those in some languages; a name is one below docs/."""
    page = ROOT / "docs" / page
    text = page.read_text()
    return [
        Block(
            page,
            1 + text.count("\n", 0, found.start("code")),
            found["language"],
            found["code"],
            found["comment"] or "",
        )
        for found in _BLOCK.finditer(text)
        if not languages or found["language"] in languages
    ]


def block(page: Path | str, text: str) -> Block:
    """The block of a page that contains a text."""
    [found] = [each for each in blocks(page) if text in each.code]
    return found
