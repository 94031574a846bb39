"""The names in docs/how-it-works.md exist in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE)))
NAMES = sorted({name for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", PAGE) if not name.endswith((".py", ".md"))})


def defined(text: str) -> set[str]:
    """Classes, functions, and methods as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def test_each_name_is_defined_in_a_file_that_the_page_names() -> None:
    known = set[str]().union(
        *(defined((ROOT / "actoffload" / f).read_text("utf-8")) for f in FILES if "tests" not in f)
    )
    assert [name for name in NAMES if name not in known] == []


def test_a_tensor_passes_at_most_eight_files_on_its_way_out() -> None:
    way_out = PAGE[PAGE.index("## Out") : PAGE.index("## Back up")]
    assert len(re.findall(r"^\d+\. `", way_out, re.MULTILINE)) <= 8
