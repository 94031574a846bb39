"""Loads ``native/hooks.cpp``, pack and unpack in C; where that cannot be, Python does the same, only slower."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import threading
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from . import native_build
from .native_build import Refused, told

NAME = "actoffload_hooks"
SOURCE = native_build.FOLDER / "hooks.cpp"


class _Process:
    """What this process has: the module once it is loaded, or the reason why it is not."""

    lock = threading.Lock()
    module: Any = None
    reason: str | None = None


def load(**known: Any) -> Any:
    """The module, built the first time that anybody asks; None where it cannot be. `refusal` says why.

    Args:
        known: what the module's ``setup`` takes: PyTorch's types and functions, and ours.
    """
    with _Process.lock:
        if _Process.module is None and _Process.reason is None:
            try:
                module = _load()
                module.setup(**known)
                _Process.module = module
            except Exception as error:  # training does not end because hooks could not be made cheaper
                _Process.reason = told(error)
        return _Process.module


def loaded() -> Any:
    """The module if `load` has found it, else None."""
    return _Process.module


def refusal() -> str:
    """Why the module is not used here, or ""; builds and loads it, if that was not done, and changes nothing."""
    if _Process.module is not None:
        return ""
    if _Process.reason is None:
        try:
            _load()
        except Exception as error:
            return told(error)
    return _Process.reason or ""


def build() -> Path:
    """Compile the module, unless that was done before; the library's path.

    Raises:
        Refused: there is no compiler, it failed, or this is no Python that the module is written for.
    """
    if not sys.platform.startswith("linux"):
        raise Refused("only on Linux")
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Refused("only for CPython with its global lock")
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude"))
    if not any((Path(folder) / "Python.h").exists() for folder in folders):
        raise Refused("Python's headers are missing (Python.h; on Debian and Ubuntu in python3-dev)")
    torchs, key = native_build.with_torch("torch_cpu", "torch_python")
    options = ["-fvisibility=hidden", "-DNDEBUG", *(f"-I{folder}" for folder in folders), *torchs]
    return native_build.build(SOURCE, options, [sys.version, sysconfig.get_config_var("SOABI") or "", *key])


def _load() -> Any:
    return native_build.load(build, _import)


def _import(path: Path) -> Any:
    loader = ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None, "a loader was given"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _after_fork_in_child() -> None:
    _Process.lock = threading.Lock()  # the other one may be held by a thread that this process does not have


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
