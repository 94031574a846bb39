"""Markers that skip tests, plugins that may be absent, and Hypothesis without a clock: shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload import OffloadConfig, Offloader
from actoffload.autograd.hook_stack import _take_all
from actoffload.memory import native_build
from actoffload.storage.engines.base import SpoolFile
from actoffload.storage.spool import Spool
from actoffload.storage.spool_files import open_arena
from actoffload.testing.simulated_device import SimulatedDevice, install
from tests.programs import warm_python
from tests.spools import MIB, MakeSpool
from tests.unit.saved_tensors import in_python

try:
    import hypothesis
except ImportError:
    pass
else:
    # Shared machines stall: a slow example is no failure.
    hypothesis.settings.register_profile("steady", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let the settings of pytest-timeout stand where that is not installed; `--strict-config` would refuse them."""
    parser.addoption("--simulated", action="store_true", help="run tests for an accelerator, on the simulated one")
    parser.addoption("--thorough", action="store_true", help="also run cases that are sampled or marked thorough")
    if not pluginmanager.hasplugin("timeout"):
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "for pytest-timeout, which is not installed here")


def pytest_configure(config: pytest.Config) -> None:
    """Register the simulated device before the first backward, as it has to be; then the process has an accelerator."""
    if config.getoption("simulated"):
        torch.set_num_threads(1)  # each stream is a thread already
        try:
            install()
        except native_build.Refused as error:
            pytest.exit(f"the simulated device cannot be had: {error}", returncode=0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--simulated``, import no file of tests that need no accelerator."""
    return True if config.getoption("simulated") and not _may_need_an_accelerator(collection_path) else None


def _may_need_an_accelerator(file: Path) -> bool:
    """Whether it is no file of tests, or its text has a mark of tests for an accelerator."""
    marks = r"mark\.(gpu|simulated)\b|\bON_EACH_DEVICE\b"
    return not file.match("test_*.py") or re.search(marks, file.read_text(encoding="utf-8")) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` without an accelerator; ``--simulated`` runs only these and the simulated ones."""
    chosen = items
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("simulated")]
    unseen = {file for file in {item.path for item in marked} if not _may_need_an_accelerator(file)}
    assert not unseen, f"{unseen} would be ignored with --simulated"
    if config.getoption("simulated"):
        chosen = marked
    if not config.getoption("thorough"):
        chosen = _sampled(chosen)
    left = set(items).difference(chosen)
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]
    if config.getoption("simulated"):
        return
    skips = {"simulated": pytest.mark.skip(reason="needs the simulated device: pytest --simulated")}
    if not torch.accelerator.is_available():
        skips["gpu"] = pytest.mark.skip(reason="needs an accelerator")
    for item in items:
        for marker, skip in skips.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)


def _sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """One case in ``every`` of a test marked ``sampled(every)``, some of ``pairs``, and none that is ``thorough``."""
    chosen, seen, pairs = [], Counter[str](), defaultdict[str, list[pytest.Item]](list)
    for item in (item for item in items if not item.get_closest_marker("thorough")):
        marker = item.get_closest_marker("sampled")
        test = item.nodeid.partition("[")[0]
        if marker is None and item.get_closest_marker("pairs"):
            pairs[test].append(item)
        elif marker is None or seen[test] % marker.args[0] == 0:
            chosen.append(item)
        seen[test] += 1
    for cases in pairs.values():
        chosen += _with_each_pair(cases)
    return [item for item in items if item in set(chosen)]


def _with_each_pair(cases: list[Any]) -> list[pytest.Item]:
    """Few cases that have each pair of values, of any two parameters, that some case has."""

    def pairs(case: Any) -> set[Any]:
        values = sorted((name, str(value)) for name, value in case.callspec.params.items())
        return set(itertools.combinations(values, 2))

    chosen: list[pytest.Item] = []
    left = set().union(*map(pairs, cases))
    while left:
        chosen.append(max(cases, key=lambda case: len(left & pairs(case))))
        left -= pairs(chosen[-1])
    return chosen


def pytest_collection_finish() -> None:
    """Freeze all objects that imports have made, so that no test searches them for garbage or for live modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_interrupts() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal: shells start background jobs with the signal ignored, which children inherit."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def _freeze_the_imports_of_a_file() -> Iterator[None]:
    """Freeze them after each file of tests, too: PyTorch's compiler alone makes such a search ten times as long."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def make_offloader(tmp_path: Path) -> Iterator[Callable[..., Offloader]]:
    """Make offloaders that by default move everything to disk without a plan; they end with the test."""
    made: list[Offloader] = []

    def make(**options: Any) -> Offloader:
        defaults: dict[str, Any] = {"target": "nvme", "path": str(tmp_path), "min_bytes": 0, "keep_last_bytes": 0}
        defaults["policy"] = "greedy"
        made.append(Offloader(OffloadConfig(**(defaults | options))))
        return made[-1]

    yield make
    for offloader in made:
        offloader.abort()


@pytest.fixture(params=["compiled", "in Python"])
def both_hooks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with the compiled hooks, and with the hooks in Python."""
    with in_python() if request.param == "in Python" else contextlib.nullcontext():
        yield


@pytest.fixture
def make_spool(tmp_path: Path) -> Iterator[MakeSpool]:
    """Make spools that grow in small steps, with small requests; they end with the test."""
    made: list[Spool] = []

    def make(*directories: Path, **options: Any) -> Spool:
        made.append(Spool(directories or [tmp_path], **{"grow_bytes": 4 * MIB, "request_bytes": MIB, **options}))
        return made[-1]

    yield make
    for spool in made:
        spool.abort()


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that this one starts need not import PyTorch."""
    monkeypatch.setattr(sys, "executable", warm_python())


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpoolFile]:
    """An empty arena, for an engine."""
    file = open_arena(str(tmp_path))
    yield file
    os.close(file.fd)


@pytest.fixture
def device() -> SimulatedDevice:
    return install()


@pytest.fixture(autouse=True)
def _no_context_stays_open() -> Iterator[None]:
    """A test that leaves hooks on autograd's stack fails itself, instead of a later one."""
    yield
    left = _take_all()
    assert not left, f"hooks are left on the stack: {left}"


@pytest.fixture(autouse=True)
def _each_has_its_own_memory(pytestconfig: pytest.Config) -> Iterator[None]:
    """On the simulated device, no test has touched memory that was not, or no longer, its tensor's.

    The cache is emptied, because the device's allocator serves a later test with whole blocks, larger than needed.
    """
    yield
    if pytestconfig.getoption("simulated"):
        install().reset()
        torch.accelerator.empty_cache()
        assert install().take_violations() == 0
