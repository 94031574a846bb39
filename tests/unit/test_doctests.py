"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import actoffload

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(actoffload.__path__, "actoffload.")
    if not name.endswith(("__main__", ".integrations"))
]


@pytest.mark.parametrize("name", ["actoffload", *MODULES])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
