"""``make options``: writes the class `Options` and the entries of docs/configuration.md from `OffloadConfig`."""

from __future__ import annotations

import re
import textwrap
from dataclasses import fields
from pathlib import Path

from actoffload import OffloadConfig
from actoffload.config import help_of_options

ROOT = Path(__file__).resolve().parents[1]
ENTRY = re.compile(r"^- `(\w+) = .*\n(?:  .*\n)*", re.MULTILINE)


def typed(source: str) -> str:
    """The text of config.py with the fields of `Options` written anew."""
    start = source.index("\n\n", source.index("class Options(TypedDict")) + 2
    lines = [f"    {field.name}: {field.type}\n" for field in fields(OffloadConfig) if field.name != "target"]
    return source[:start] + "".join(lines) + source[source.index("\n\n\n", start) + 1 :]


def entries(page: str) -> str:
    """The text of docs/configuration.md with its entries written anew; one that is new follows the option before it."""
    there = {found[1] for found in ENTRY.finditer(page)}
    texts: dict[str, str] = {}
    before = ""
    for field in fields(OffloadConfig):
        default = f'"{field.default}"' if isinstance(field.default, str) else field.default
        text = f"- `{field.name} = {default}`: {help_of_options()[field.name].replace('``', '`')}"
        wrapped = textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        before = field.name if field.name in there else before
        texts[before] = texts.get(before, "") + wrapped + "\n"
    return ENTRY.sub(lambda found: texts.get(found[1], ""), page)


WRITTEN = {"actoffload/config.py": typed, "docs/configuration.md": entries}

if __name__ == "__main__":
    for name, write in WRITTEN.items():
        file = ROOT / name
        file.write_text(write(file.read_text(encoding="utf-8")), encoding="utf-8")
