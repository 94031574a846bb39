"""Fixtures of the parity tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from actoffload import Offloader

from .places import PLACES, SIMULATED, Maker, Place


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The tensors are tiny: with more threads than free cores most of the time goes to their barriers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each place that this machine has; in the matrix the simulated device too, and one for the CPU: both are disk."""
    if "place" in metafunc.fixturenames:
        places = [PLACES[0], *SIMULATED] if metafunc.module.__name__.endswith("test_matrix") else PLACES
        marks = {place.name: [pytest.mark.simulated, pytest.mark.sampled(11)] for place in SIMULATED}
        params = [pytest.param(place, id=place.name, marks=marks.get(place.name, ())) for place in places]
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
