"""Fixtures of the unit tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from actoffload import native_hooks
from actoffload.engines.base import SpoolFile
from actoffload.native_known import hooks_in_c
from actoffload.paths import open_arena
from actoffload.spool import Spool
from tests.spools import MIB, MakeSpool
from tests.unit.natively import in_python


@pytest.fixture
def make_spool(tmp_path: Path) -> Iterator[MakeSpool]:
    """Make spools that grow in small steps; they end with the test."""
    made: list[Spool] = []

    def make(*directories: Path, **options: Any) -> Spool:
        made.append(Spool(directories or [tmp_path], **{"grow_bytes": 4 * MIB, **options}))
        return made[-1]

    yield make
    for spool in made:
        spool.abort()


@pytest.fixture
def native() -> Any:
    """The hooks in C."""
    module = hooks_in_c()
    assert module is not None, native_hooks.refusal()
    return module


@pytest.fixture(params=["C", "Python"])
def either(request: pytest.FixtureRequest) -> Iterator[str]:
    """What is made in the test is made in C, or else in Python."""
    if request.param == "C" and hooks_in_c() is None:
        pytest.skip(native_hooks.refusal())
    with in_python() if request.param == "Python" else nullcontext():
        yield request.param


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpoolFile]:
    """An empty arena, for an engine."""
    file = open_arena(str(tmp_path))
    yield file
    os.close(file.fd)
