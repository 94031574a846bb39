"""How the hooks in C are built and loaded, and where they are refused: the reason is said, and Python does it."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actoffload import native_build, native_hooks
from actoffload.handles import Kept, KeptActivation
from tests.harness import MakeOffloader
from tests.unit.natively import TOLD
from tests.unit.test_native_hooks import LEAST_BYTES, ones

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("c++") is None, reason="Linux and a C++ compiler"
)


@pytest.fixture
def python_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no compiler."""
    monkeypatch.setattr(native_hooks._Process, "module", None)
    monkeypatch.setattr(native_hooks._Process, "reason", "not in this test")


def test_a_child_does_not_wait_for_who_was_building_when_it_was_forked(
    native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = native_hooks._Process.lock
    with lock:
        native_hooks._after_fork_in_child()
        assert native_hooks.load() is native
    monkeypatch.setattr(native_hooks._Process, "lock", lock)


def test_without_them_python_does_it(python_only: None, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    weight = nn.Parameter(torch.ones(4))
    assert offloader._hooks()[0] == offloader._pack
    with offloader:
        assert type(offloader._pack(ones(4))) is KeptActivation
        assert type(offloader._pack(weight)) is Kept
        out = (ones(4) * weight).sin()
    out.sum().backward()
    assert offloader.statistics().kept_bytes == {"below min_bytes": 3 * 16, "parameter": 2 * 16}


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("switch", "ACTOFFLOAD_NATIVE=0 is set"),
        ("headers", "Python.h"),
        ("platform", "only on Linux"),
        ("free-threaded", "only for CPython with its global lock"),
        ("broken", "the C++ compiler failed: hooks.cpp"),
        ("library", "could not be loaded"),
        ("torch", "TypeError: this release of PyTorch lays out its objects otherwise"),
    ],
)
def test_where_they_cannot_be_had_the_reason_is_said(
    why: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_hooks._Process, "module", None)
    monkeypatch.setattr(native_hooks._Process, "reason", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if why == "switch":
        monkeypatch.setenv(native_build.SWITCH, "0")
    elif why == "headers":
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    elif why == "platform":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif why == "free-threaded":
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1)
    elif why in ("broken", "library"):
        bad = tmp_path / "hooks.cpp"
        bad.write_text("no program" if why == "broken" else "int nothing;")
        monkeypatch.setattr(native_hooks, "SOURCE", bad)
    assert native_hooks.load(**TOLD) is None
    assert told in native_hooks.refusal().replace(str(tmp_path) + "/", "")
    assert native_hooks.loaded() is None


def test_a_damaged_module_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = native_hooks.build()
    library.write_bytes(b"")
    assert native_hooks._load() is not None
    assert library.stat().st_size > 0
