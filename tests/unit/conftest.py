"""Fixtures of the unit tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actoffload.storage.engines.base import SpoolFile
from actoffload.storage.spool import Spool
from actoffload.storage.spool_files import open_arena
from tests.spools import MIB, MakeSpool


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
def file(tmp_path: Path) -> Iterator[SpoolFile]:
    """An empty arena, for an engine."""
    file = open_arena(str(tmp_path))
    yield file
    os.close(file.fd)
