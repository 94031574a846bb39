"""Builds, loads and sets up the compiled hooks (``hooks.cpp``): pack and unpack of the tensors that never move.

Where they cannot be used, `refusal` returns the reason, and the Python hooks do the same work more slowly.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import threading
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..locks import renewed_in_child
from ..memory import native_build
from ..memory.cpu_allocator import HeldBlock
from ..memory.native_build import SWITCH, Refused, told
from ..memory.slots import Slot
from ..policy import STATIC, KeepReason
from ..runtime import identity
from ..runtime.untraced import untraced
from ..tiers.storage_ref import StorageRef
from .exclusions import OPEN_REGIONS
from .handles import Handle, KeptActivation, Stayed, check_version, hand_out, let_go, shape_of, unpack_only

NAME = "actoffload_hooks"
SOURCE = native_build.PACKAGE / "autograd" / "hooks.cpp"
TESTED = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
"""Releases of PyTorch with an object layout that tests cover. ``ACTOFFLOAD_NATIVE=1`` (or ``=hooks``) permits any
release: the module still checks at load where a tensor lies in its Python object."""

FINALIZED: tuple[Any, ...] = (Handle, Stayed, KeptActivation, Slot, StorageRef, HeldBlock)
"""Classes of objects that die as autograd frees a graph, often just after a kernel. Python would only print an
interrupt that arrives in their finalizers, so the module wraps these."""


class _Process:
    """This process's module, once it is loaded, or the reason why it is not."""

    lock = renewed_in_child(threading.Lock())
    module: Any = None
    reason: str | None = None


def load() -> Any:
    """Return the module, which the first call builds, or None where it cannot be used (`refusal` has the reason).

    The module has the unpack hook, ``unpack``, and ``Pack``, whose ``pack`` is the pack hook. It needs all arguments:

    - ``notes``: `Accounts.deferred`. The hooks append each tensor that stays, and the death of each activation.
    - ``settle``: called without arguments once there are ``many`` notes.
    - ``fallback``: the pack hook in Python, for every tensor that the module leaves to it.
    - ``save``: returns the handle of a plain tensor that may move; called with it and the bytes of its storage.
    - ``static``: the storages that never move, `StorageSet.by_number`; ``marked``: likewise, of ``keep()``.
    - ``awaited``: a dictionary. While it has any item, ``fallback`` gets every tensor that ``static`` does not name.
    - ``least``: bytes by type of device. Smaller storages stay. For a type without an entry ``fallback`` decides.
    - ``recording``: a list. While it has any item, ``fallback`` gets every activation.
    """
    with _Process.lock:  # held during the build, so that other threads wait for it instead of compiling as well
        if _Process.module is None and _Process.reason is None:
            try:
                _Process.module = _load()
            except Exception as error:  # the compiled hooks only save time, so training goes on without them
                _Process.reason = told(error)
        return _Process.module


def refusal() -> str:
    """Return why this process does not use the module, or "". Builds and loads it first, if needed."""
    load()
    return _Process.reason or ""


def build() -> Path:
    """Compile the module unless the cache has it; return the library's path.

    Raises:
        Refused: there is no compiler, it failed, or the module is not written for this Python or PyTorch.
    """
    if not sys.platform.startswith("linux"):
        raise Refused("only on Linux")
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Refused("only for CPython with its global lock")
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in TESTED and os.environ.get(SWITCH) not in ("1", SOURCE.stem):
        raise Refused(f"not tested with PyTorch {release} ({TESTED[0]} to {TESTED[-1]}; {SWITCH}=1 has it tried)")
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude"))
    if not any((Path(folder) / "Python.h").exists() for folder in folders):
        raise Refused("Python's headers are missing (Python.h; on Debian and Ubuntu in python3-dev)")
    torchs, key = native_build.with_torch("torch_cpu", "torch_python")
    options = ["-fvisibility=hidden", "-DNDEBUG", *(f"-I{folder}" for folder in folders), *torchs]
    return native_build.build(SOURCE, options, [sys.version, sysconfig.get_config_var("SOABI") or "", *key])


def _load() -> Any:
    module = native_build.load(build, _import)
    module.setup(
        tensor=Tensor,
        parameter=nn.Parameter,
        regions=OPEN_REGIONS,
        reasons={note: note for note in STATIC},  # the reason why a storage stays, by its note in a `StorageSet`
        small=KeepReason.SMALL.value,
        changed=_changed,
        unpack=untraced(unpack_only),
        hand_out=untraced(hand_out),
        let_go=untraced(let_go),
        samples=_samples(),
    )
    # Last, as `setup` may refuse this PyTorch: the Python hooks then keep their own.
    identity.Compiled.same_counter = module.same_counter
    for owner in FINALIZED:
        owner.__del__ = module.finalizer(owner.__del__)
    return module


def _import(path: Path) -> Any:
    loader = ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None, "a loader was given"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _changed(alias: Tensor, version: int) -> None:
    """Raise autograd's error for a saved tensor that was changed in place."""
    check_version(alias._version, version, alias.dtype, shape_of(alias), None)


def _samples() -> tuple[Tensor, ...]:
    """Return tensors that PyTorch made in different ways. They show the module where a tensor lies in its object."""
    with torch.inference_mode(False):
        tensor = torch.empty(2, dtype=torch.float32, device="cpu")
        wanted = tensor.clone().requires_grad_()
        return tensor, tensor[1:], tensor.detach(), nn.Parameter(tensor), wanted, wanted * 1.0
