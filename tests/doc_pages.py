"""Reads the pages of the documentation: their blocks of code, and what stands before and after each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
GUIDES = [PROJECT / "README.md", *sorted((PROJECT / "docs" / "guide").glob("*.md"))]
TUTORIAL = PROJECT / "docs" / "guide" / "tutorial.md"  # its commands need one another, in its order
PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").rglob("*.md"))]
COMMANDS = frozenset({"bash", "python"})
OUTPUT = frozenset({"text", "json"})
_BLOCK = re.compile(r"((?:<!--.*?-->\n+)*)```(\w*)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page. A comment `<!-- not run: REASON -->` before it says why no test runs it."""

    page: Path
    line: int
    language: str
    text: str
    comment: str  # what stands in comments directly before it
    expected: Block | None = None  # the output that directly follows a command

    @property
    def is_run(self) -> bool:
        return "not run:" not in self.comment

    def __str__(self) -> str:
        return f"{self.page.relative_to(PROJECT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order. A block of output belongs to the command that it directly follows."""
    text = page.read_text(encoding="utf-8")
    command: Block | None = None
    end = 0
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        block = Block(page, line, match[2], match[3], match[1])
        follows = not text[end : match.start()].strip()
        end = match.end()
        if command is not None and follows and block.language in OUTPUT:
            yield Block(command.page, command.line, command.language, command.text, command.comment, block)
            command = None
            continue
        if command is not None:
            yield command
        command = block if block.language in COMMANDS else None
        if command is None:
            yield block
    if command is not None:
        yield command
