"""Fixtures of the parity tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from actoffload import Offloader

from .places import OF_LARGE_TENSORS, PLACES, Maker, Place


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The tensors are tiny: with more threads than free cores most of the time goes to their barriers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each place that this machine has; the matrix names its own."""
    if "place" in metafunc.fixturenames and not metafunc.module.__name__.endswith("test_matrix"):
        again = () if metafunc.function.__name__ in OF_LARGE_TENSORS else pytest.mark.thorough
        first, second = PLACES
        params = [pytest.param(first, id=first.name), pytest.param(second, id=second.name, marks=again)]
        metafunc.parametrize("place", params)


@pytest.fixture
def make_offloader(place: Place, tmp_path: Path) -> Iterator[Maker]:
    """Makes offloaders for each place in turn."""
    maker = Maker(place, tmp_path)
    yield maker
    maker.close()


@pytest.fixture(scope="module")
def offloader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offloader]:
    """One for each module and worker, with everything on disk; the module's ``OFFLOADER_OPTIONS`` are added."""
    place = Place("nvme", {"target": "nvme", "debug": True})
    offloader = place.make(tmp_path_factory.mktemp("spool"), getattr(request.module, "OFFLOADER_OPTIONS", {}))
    yield offloader
    offloader.close()
