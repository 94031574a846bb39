"""The commands and the blocks of code in the documentation, as a reader finds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("*.md", "docs/**/*.md", "benchmarks/*.md", "integrations/**/*.py")
HISTORY = ("CHANGELOG.md", "benchmarks/LOG.md")
PROGRAMS = "accelerate|actoffload|apt-get|make|pip|pre-commit|pytest|python|torchrun"
COMMAND = rf"(?:\w+=\S+ )*(?:{PROGRAMS}) [^`\n]+"
NAME = re.compile(r"(actoffload|accelerate) [\w-]+")
"""A command's name within a sentence."""
MARK = re.compile("needs a GPU|needs the network|by hand", re.IGNORECASE)
"""In the comment or clause of a command, or in the heading above it: it has needs that CI does not meet."""
CLAUSE = re.compile(r"(?:`[^`]+`|[^`;|.]|\.(?!\s))+")
PIECE = re.compile(r"^#+ (?P<heading>[^\n]+)$|^```(?P<kind>\S*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


class Piece(NamedTuple):
    """A block of code and its language, or the text between two blocks (``prose``)."""

    name: str
    """The page and the heading above."""
    kind: str
    text: str


class Command(NamedTuple):
    """A command, where it stands, and whether it has a mark."""

    name: str
    text: str
    marked: bool


def read(file: Path) -> str:
    """Return the text of a page; of a program, the commands in its docstring."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        lines = re.findall(rf"^    ({COMMAND})$", text.split('"""')[1].replace("\\\n", ""), re.MULTILINE)
        text = "```bash\n{}\n```".format("\n".join(lines))
    return f"{text}\n# end"


def pieces() -> Iterator[Piece]:
    """Yield the pieces of all pages, in order."""
    for file in (file for folder in FOLDERS for file in sorted(ROOT.glob(folder))):
        if (page := str(file.relative_to(ROOT))) not in HISTORY:
            text, name, end = read(file), page, 0
            for match in PIECE.finditer(text):
                yield Piece(name, "prose", text[end : match.start()])
                name, end = f"{page}, {match['heading']}" if match["heading"] else name, match.end()
                if match["code"]:
                    yield Piece(name, match["kind"], match["code"])


def commands() -> Iterator[Command]:
    """Each line of the blocks for a shell, and each command within a sentence."""
    for name, kind, text in pieces():
        if kind == "bash":
            for line in filter(str.strip, re.sub(r"\\\n\s*", "", text).splitlines()):
                yield Command(name, line.partition(" #")[0].strip(), bool(MARK.search(f"{name}: {line}")))
        elif kind == "prose":
            for clause in CLAUSE.findall(" ".join(text.split())):
                there = [each for each in re.findall(f"`({COMMAND})`", clause) if not NAME.fullmatch(each)]
                yield from (Command(name, each, bool(MARK.search(f"{name}: {clause}"))) for each in there)


BLOCKS = {piece.name: piece.text for piece in pieces() if piece.kind == "python"}
