"""Checkpointed regions: a plan chooses which of a program's checkpoints run again in backward.

``torch.utils.checkpoint.checkpoint(use_reentrant=False)`` runs a private generator function of PyTorch's around the
first run of a region. Ours stands in its place, so that no model is touched. Where no context is open it returns
PyTorch's own generator.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as plain
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..locks import renewed_in_child
from ..runtime.identity import PLAIN_TYPES, storages
from ..runtime.regions import Recomputation, Region
from ..runtime.store import ActivationStore
from ..tiers.storage_ref import StorageRef
from .exclusions import Exclusions
from .handles import sharing_counters, version_probe
from .hook_stack import top
from .module_names import ModuleScopes
from .packing import Forwards, Packer

NAME = "_checkpoint_without_reentrant_generator"
_FORMS = {f"{NAME}_impl": ("fn", "args", "kwargs"), NAME: ("fn", "preserve_rng_state", "context_fn")}
"""Names of PyTorch's generator function, and how its arguments begin. From 2.14 on it is the first, and the second is a
plain function that calls it."""
CACHING_MODES: list[type] = [kind for kind in (getattr(plain, "_CachingTorchDispatchMode", None),) if kind is not None]
"""Contexts of a region's first run that keep what its second run needs: for a region that runs once, for nothing."""
REFUSED = (
    "checkpointed regions stay as they are: this PyTorch ({}) has no function torch.utils.checkpoint.{} of the form "
    "that is known here. They all run again in backward, and what they hold there is not counted"
)
Body = Generator[None, None, None]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    """Run a function, and let a plan choose whether backward runs it again or uses what this run saved.

    It is ``torch.utils.checkpoint.checkpoint``, with its arguments, its meaning and its contract: *the function
    computes the same when it runs again*. Outside of an offloader's context nothing differs. Inside,
    ``policy="auto"`` and a given `Plan` choose for each call, by its place in the forward. Any other policy lets each
    run again.

    Args:
        function: what to run.
        args: its arguments.
        use_reentrant: as of PyTorch's function; only ``False`` leaves a choice.
        options: the other arguments of PyTorch's function, and keyword arguments of ``function``.

    Returns:
        What ``function`` returns.

    >>> x = torch.ones(2, 2, requires_grad=True)
    >>> checkpoint(lambda x: (x @ x).sin(), x).shape
    torch.Size([2, 2])
    """
    return plain.checkpoint(function, *args, use_reentrant=use_reentrant, **options)


def must_be_plain() -> bool:
    """Whether a graph is being traced, or this is a recomputation, whose own backward follows at once."""
    kinds = torch._C._TorchDispatchModeKey
    tracing = any(map(torch._C._get_dispatch_mode, (kinds.PROXY, kinds.FAKE, kinds.FUNCTIONAL)))
    return tracing or torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1


class Checkpoints:
    """What one offloader makes of the checkpoints that run in its contexts.

    Args:
        store: chooses, and counts what runs again.
        packer: knows which forward runs, and why a tensor stays.
        forwards: the entries of its contexts.
        exclusions: what is no activation.
        names: the modules by their names, where they are known.
    """

    def __init__(
        self,
        store: ActivationStore,
        packer: Packer,
        forwards: Forwards,
        exclusions: Exclusions,
        names: ModuleScopes,
    ) -> None:
        self.forwards = forwards
        self._regions, self._profiler = store.regions, store.profiler
        self._packer, self._exclusions, self._names = packer, exclusions, names
        with _Original.lock:  # another thread may look for the innermost
            _everywhere.add(self)

    def retire(self) -> None:
        """Choose no more."""
        with _Original.lock:
            _everywhere.discard(self)

    @property
    def region(self) -> Region | None:
        """The region of this offloader that runs in this thread, if one does."""
        return next((entry.region for entry in self.forwards.stack if entry.region is not None), None)

    def run(self, given: tuple[Any, ...], options: dict[str, Any]) -> Body:
        """The generator that goes around the first run of a region: with its first step the region begins.

        Args:
            given: the arguments of PyTorch's generator function; ``options``: those by name.
        """
        entry, function = self.forwards.stack[-1], given[0]
        name = self._name(function) if self._profiler.running else ""  # only a recorded step shows it
        region = self._regions.begin(self._packer.tape(), name)
        entry.region = region
        try:
            if region.once:
                yield
            elif region.recorded is None:
                yield from self.counted(region, False, given, options)
            else:
                with closing(self.counted(region, False, given, options)) as body:
                    next(body)
                    with _seeing(functools.partial(_note_version, region.recorded.versions)):
                        yield
                    yield from body
        finally:
            # Where the region raised, a finalizer may close this generator, in any thread: it takes no lock.
            entry.region = None
            if region.recorded is not None:
                region.recorded.over = True
        self._regions.end(region)

    def counted(self, region: Region, nested: bool, given: tuple[Any, ...], options: dict[str, Any]) -> Body:
        """PyTorch's own generator, but what the second run holds is counted.

        Args:
            region: that runs.
            nested: the checkpoint is one inside of the region.
            given: as of `run`; ``options``: likewise.
        """
        # PyTorch calls this function for the second run alone.
        again = functools.partial(self._run_again, region, nested, given[0])
        return _Original.function(again, *given[1:], **options)

    def _run_again(
        self, region: Region, nested: bool, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        inputs = tree_leaves((args, kwargs, list(_bound(function))))
        with _disable_current_modes():  # what is released to make room is no operation of the region's
            recomputation = self._regions.again(region, nested=nested)
        note = self._note if region.recorded is not None and not nested else None
        with _Counted(recomputation, inputs, self._is_static, note):
            try:
                return function(*args, **kwargs)
            finally:
                self._regions.ran_again(recomputation)

    def _is_static(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        return self._exclusions.why_static(tensor, storage) is not None

    def _note(self, region: Region, tensor: Tensor, nbytes: int) -> None:
        if self._profiler.running and region.recorded is not None:
            self._profiler.region_saved(region.recorded, nbytes, self._packer.why_unrecorded(tensor))

    def _name(self, function: Any) -> str:
        """What stands for a region: the qualified name of its module, else the name of its class or function."""
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(function)
        owner = getattr(function, "__self__", function)
        if isinstance(owner, nn.Module):
            return self._names.name_of(owner) or type(owner).__name__
        return getattr(function, "__qualname__", type(function).__name__)


class _Counted:
    """Counts the storages that a second run saves, and leaves them to the checkpoint's hooks, which are there."""

    def __init__(
        self,
        recomputation: Recomputation,
        inputs: list[Any],
        is_static: Callable[[Tensor, torch.UntypedStorage], bool],
        note: Callable[[Region, Tensor, int], None] | None,
    ) -> None:
        self._recomputation = recomputation
        tensors = (leaf for leaf in inputs if isinstance(leaf, Tensor))
        self._inputs = {storage._cdata for tensor in tensors for storage in storages(tensor)}
        self._is_static, self._note = is_static, note

    def __enter__(self) -> None:
        self._hooks = _seeing(self._count)
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:  # also when the checkpoint ends the second run early
        self._hooks.__exit__(*error)

    def _count(self, tensor: Tensor) -> None:
        saved = self._recomputation.saved
        for storage in (tensor.untyped_storage(),) if _is_strided(tensor) else storages(tensor):
            number = storage._cdata
            recorded = self._recomputation.region.recorded
            if number in self._inputs and recorded is not None:
                recorded.input_bytes = max(recorded.input_bytes, storage.nbytes())
            if number in saved or number in self._inputs or self._is_static(tensor, storage):
                continue
            ref, nbytes = StorageRef(storage), storage.nbytes()
            saved[ref.cdata] = ref, nbytes
            if self._note is not None:
                self._note(self._recomputation.region, tensor, nbytes)


@contextmanager
def _seeing(see: Callable[[Tensor], None]) -> Iterator[None]:
    """A context in which ``see`` is called with each tensor that a checkpoint's hooks take, which are there."""
    # Only the innermost hooks are called.
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def seen(tensor: Tensor) -> Any:
        see(tensor)
        return pack(tensor)

    # As on a checkpoint's own hooks: whoever looks for the user's (PyTorch, from 2.14 on) has to look behind them.
    # Only while they are active, as a graph keeps them.
    seen._checkpoint_internal = True  # type: ignore[attr-defined]
    seen._user_hooks = getattr(pack, "_user_hooks", None)  # type: ignore[attr-defined]
    try:
        with torch.autograd.graph.saved_tensors_hooks(seen, unpack):
            yield
    finally:
        del seen._user_hooks  # type: ignore[attr-defined]


def _note_version(versions: list[tuple[Tensor, int]], tensor: Tensor) -> None:
    """Note what tells, when the region runs again, whether a tensor that its first run saved was changed since."""
    if _is_strided(tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        with _disable_current_modes(), sharing_counters():  # it is no operation of the region's
            versions.append((version_probe(tensor.detach()), tensor._version))


def _is_strided(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_meta


def _bound(function: Any) -> Iterator[Any]:
    """What a function has of its caller's: it existed before the function runs."""
    while isinstance(function, functools.partial):
        yield function.args
        yield function.keywords
        function = function.func
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue


def _with_contexts(given: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """The arguments of PyTorch's generator function with their contexts made, and whether the region may run once.

    A first context of the program's own (torch_remat's, TransformerEngine's) notes what the second run needs, or that
    there is one. Only PyTorch's selective ones are known to do no more than to keep tensors for it.
    """
    named = "context_fn" in options
    context_fn = options["context_fn"] if named else given[2] if len(given) > 2 else None
    if not callable(context_fn) or context_fn is plain.noop_context_fn:  # `given[2]` may be the function's `kwargs`
        return given, options, True
    contexts = context_fn()

    def made() -> Any:
        return contexts

    given, options = (given, {**options, "context_fn": made}) if named else ((*given[:2], made, *given[3:]), options)
    return given, options, type(contexts[0]) in (nullcontext, *CACHING_MODES)


# -- in PyTorch's place -----------------------------------------------------------------------------------------------

_everywhere: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


class _Original:
    """PyTorch's own generator function, once ours stands in its place."""

    lock = renewed_in_child(threading.Lock())
    function: Callable[..., Body]


def _in_its_place(*given: Any, **options: Any) -> Body:
    """The generator around a region's first run: PyTorch's own, unless an offloader's hooks are the innermost."""
    above = top()
    if above is None or not torch.is_grad_enabled() or must_be_plain():
        return _Original.function(*given, **options)
    with _Original.lock:
        all_of_them = list(_everywhere)
    for checkpoints in all_of_them:
        region = checkpoints.region
        if region is not None:
            # It runs as its program says: a region's second run must meet what its first one met.
            return checkpoints.counted(region, True, given, options)
    found = next((one for one in all_of_them if one.forwards.innermost_hook is above[0]), None)
    if found is not None:
        given, options, is_free = _with_contexts(given, options)
        if is_free:
            return found.run(given, options)
    return _Original.function(*given, **options)


def install() -> str:
    """Put our generator function in the place of PyTorch's, for the rest of the process; return why not, or ""."""
    with _Original.lock:
        for name, leading in _FORMS.items():
            found: Any = getattr(plain, name, None)
            if found is _in_its_place:
                return ""
            parameters = tuple(inspect.signature(found).parameters) if inspect.isgeneratorfunction(found) else ()
            if parameters[: len(leading)] == leading:
                break
        else:
            return REFUSED.format(torch.__version__, NAME)
        _Original.function = found
        setattr(plain, name, _in_its_place)
        composable: Any = sys.modules.get("torch.distributed._composable.checkpoint_activation")
        if getattr(composable, name, None) is found:  # it has imported the name
            setattr(composable, name, _in_its_place)
    return ""
