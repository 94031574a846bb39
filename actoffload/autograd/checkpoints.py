"""Checkpointed regions: a plan chooses which of a program's checkpoints run again in backward.

``torch.utils.checkpoint.checkpoint(use_reentrant=False)`` runs a private generator function of PyTorch around the first
run of a region. This module replaces that function, so that no model needs a change. Without an open context the
replacement returns PyTorch's own generator. Reentrant checkpoints are only counted.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as plain
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..locks import renewed_in_child
from ..planning.profile import DERIVED
from ..runtime.regions import Recomputation, Region
from ..runtime.store import ActivationStore
from ..runtime.untraced import untraced, untraced_frame
from ..tiers.storage_ref import StorageRef
from .exclusions import Exclusions
from .handles import sharing_counters, version_probe
from .hook_stack import top
from .module_names import ModuleScopes
from .packing import Forwards, Packer
from .tensors import PLAIN_TYPES, storage_numbers, storages

NAME = "_checkpoint_without_reentrant_generator"
_FORMS = {f"{NAME}_impl": ("fn", "args", "kwargs"), NAME: ("fn", "preserve_rng_state", "context_fn")}
"""The names of PyTorch's generator function and of its leading arguments. From 2.14 on the first name is the generator,
and the second is a plain function that calls it."""
CACHING_MODES: dict[type, Callable[[tuple[Any, Any]], tuple[Any, Any]]] = {}
"""Context classes that only cache tensors for a region's second run, so a region that runs once can do without them;
and the function that returns, for a pair of contexts that begins with one, the pair with which the region runs."""
REFUSED = (
    "checkpointed regions stay as they are: this PyTorch ({}) has no function torch.utils.checkpoint.{} of the form "
    "that is known here. They all run again in backward, and what they hold there is not counted"
)
REENTRANT = (
    "{} checkpointed blocks run again in backward in any case, because their checkpoints are reentrant. With "
    "use_reentrant=False (in Transformers gradient_checkpointing_kwargs={{'use_reentrant': False}}) a plan may let "
    "some of them run once, which shortens the step"
)
Body = Generator[None, None, None]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    """Run a function, and let a plan choose whether backward runs it again or uses the tensors that this run saved.

    It is ``torch.utils.checkpoint.checkpoint``, with its arguments, its meaning and its contract: *the function
    computes the same when it runs again*. Outside of an offloader's context nothing differs. Inside,
    ``policy="auto"`` or a `Plan` chooses for each call, by its place in the forward. Under any other policy each call
    runs again.

    Args:
        function: the function to run.
        args: its arguments.
        use_reentrant: as in PyTorch's function; only ``False`` leaves a choice.
        options: the other arguments of PyTorch's function, and keyword arguments of ``function``.

    Returns:
        The result of ``function``.

    >>> x = torch.ones(2, 2, requires_grad=True)
    >>> checkpoint(lambda x: (x @ x).sin(), x).shape
    torch.Size([2, 2])
    """
    return plain.checkpoint(function, *args, use_reentrant=use_reentrant, **options)


def must_be_plain() -> bool:
    """Return whether checkpoints stay plain: PyTorch traces a graph, or backward runs and uses the tensors at once."""
    kinds = torch._C._TorchDispatchModeKey
    tracing = any(map(torch._C._get_dispatch_mode, (kinds.PROXY, kinds.FAKE, kinds.FUNCTIONAL)))
    return tracing or torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1


class Checkpoints:
    """The checkpointed regions in the contexts of one offloader.

    Args:
        store: chooses the regions that run once, and counts recomputations.
        packer: knows the running forward, and why a tensor stays.
        forwards: the entries of the offloader's contexts.
        exclusions: the tensors that are no activations.
        names: the names of modules, as far as they are known.

    Attributes:
        planned: whether a plan may choose among them.
    """

    def __init__(
        self,
        store: ActivationStore,
        packer: Packer,
        forwards: Forwards,
        exclusions: Exclusions,
        names: ModuleScopes,
    ) -> None:
        self.packer, self.forwards = packer, forwards
        self.planned = store.shared.config.checkpoints == "plan"
        self._regions, self._profiler, self._decision = store.regions, store.profiler, store.decision
        self._exclusions, self._names = exclusions, names
        with _Original.lock:  # another thread may iterate over them meanwhile
            _everywhere[id(forwards)] = self

    @property
    def region(self) -> Region | None:
        """The region of this offloader that runs in this thread, or None."""
        return next((entry.region for entry in self.forwards.stack if entry.region is not None), None)

    def run(self, given: tuple[Any, ...], options: dict[str, Any]) -> Body:
        """Return the generator around the first run of a region. The region begins with the generator's first step.

        Args:
            given: the positional arguments of PyTorch's generator function; ``options``: its keyword arguments.
        """
        entry, function = self.forwards.stack[-1], given[0]
        name = self._name(function) if self._profiler.running else ""  # only a recorded step shows names
        tape = self.packer.tape()
        if not len(tape) and not tape.regions:  # first: the shapes decide on the plan, and so on this region
            leaves = tree_leaves((given[1:], options))
            self._decision.begins_with(sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)))
        region = self._regions.begin(tape, name)
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
            # If the region raised, a finalizer may close this generator, in any thread. So this takes no lock.
            entry.region = None
            self._regions.over(region)
        self._regions.end(region)

    def counted(self, region: Region, nested: bool, given: tuple[Any, ...], options: dict[str, Any]) -> Body:
        """Return PyTorch's own generator, with a count of the bytes that the second run holds.

        Args:
            region: the running region.
            nested: whether the checkpoint lies inside of the region.
            given: as for `run`; ``options``: likewise.
        """
        # PyTorch calls this function for the second run alone.
        again = functools.partial(self._run_again, region, nested, given[0])
        return _Original.function(again, *given[1:], **options)

    def _run_again(
        self, region: Region, nested: bool, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        given = tree_leaves((args, kwargs, list(_bound(function))))
        # A nested checkpoint is one of several, and a selective one's mode has cached another part in each plan. A
        # reading outside of backward, of `grad_fn` say, uses nothing up.
        varies = nested or torch._C._len_torch_dispatch_stack() or torch._C._current_graph_task_id() == -1
        alike = None if varies else _alike(function, given)
        with _disable_current_modes():  # the region's modes must not see the operations that make room
            recomputation = self._regions.again(region, nested=nested, alike=alike)
        counted: AbstractContextManager[object] = nullcontext()
        if recomputation.known_bytes is None:
            noted = region.recorded is not None and not nested
            counted = _seeing(self._counter(recomputation, storage_numbers(given), storage_numbers(args), noted=noted))
        whole = False
        try:
            with counted:
                found = function(*args, **kwargs)
            whole = True
            return found
        except plain._StopRecomputationError:  # all that backward needs is saved
            whole = True
            raise
        finally:
            self._regions.ran_again(recomputation, whole=whole)

    def _counter(
        self, recomputation: Recomputation, inputs: set[int], arguments: set[int], *, noted: bool
    ) -> Callable[[Tensor], None]:
        """Return a function that counts the storages of a tensor that a second run saves.

        Args:
            recomputation: has the counts.
            inputs: the numbers of storages that existed before. The caller holds them until the run has ended.
            arguments: of these, the storages that the checkpoint itself has saved.
            noted: whether the profiler notes them as well.
        """
        region, outside = recomputation.region, inputs - arguments if noted else set()

        def count(tensor: Tensor) -> None:
            for storage in (tensor.untyped_storage(),) if _is_strided(tensor) else storages(tensor):
                number, nbytes, saved = storage._cdata, storage.nbytes(), recomputation.saved
                if number in inputs:
                    if region.recorded is not None and number in arguments:
                        region.recorded.input_bytes = max(region.recorded.input_bytes, nbytes)
                    if number in outside and self._exclusions.why_static(tensor, storage) is None:
                        outside.remove(number)
                        self._note(region, tensor, nbytes, storage)
                elif number not in saved and self._exclusions.why_static(tensor, storage) is None:
                    ref = StorageRef(storage)
                    saved[ref.cdata] = ref, 0 if number in recomputation.leaving else nbytes
                    if noted:
                        self._note(region, tensor, nbytes, None)

        return count

    def _note(self, region: Region, tensor: Tensor, nbytes: int, outside: torch.UntypedStorage | None) -> None:
        if outside is not None and self.packer.has_record(outside):  # the forward has saved it outside of regions
            return
        if self._profiler.running and region.recorded is not None:
            with self._profiler.stopwatch.hook(), self._profiler.noting():
                reason = self.packer.why_unrecorded(tensor)
                kept = "" if reason is None else reason.value
                saved_bytes = self.packer.bytes_recorded(tensor, nbytes, region.tape)
                saved = (nbytes, DERIVED) if not saved_bytes and not kept else (saved_bytes or nbytes, kept)
                self._profiler.region_saved(region.recorded, *saved, outside)

    def _name(self, function: Any) -> str:
        """Return a name for a region: the qualified name of its module, else the name of its class or function."""
        function, module = _unwrapped(function)
        if module is not None:
            return self._names.name_of(module) or type(module).__name__
        return getattr(function, "__qualname__", type(function).__name__)


@contextmanager
def _seeing(see: Callable[[Tensor], None]) -> Iterator[None]:
    """Return a context that calls ``see`` with each tensor that the checkpoint's hooks, now on top, receive."""
    # Autograd calls the innermost hooks only, so these call the checkpoint's.
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def seen(tensor: Tensor) -> Any:
        see(tensor)
        return pack(tensor)

    # PyTorch's checkpoint marks its own hooks like this. From 2.14 on it then looks behind them for the user's hooks.
    # A graph keeps `seen`, so the reference to the user's hooks goes when the context ends.
    seen._checkpoint_internal = True  # type: ignore[attr-defined]
    seen._user_hooks = getattr(pack, "_user_hooks", None)  # type: ignore[attr-defined]
    try:
        with torch.autograd.graph.saved_tensors_hooks(seen, unpack):
            yield
    finally:
        del seen._user_hooks  # type: ignore[attr-defined]


def _note_version(versions: list[tuple[Tensor, int]], tensor: Tensor) -> None:
    """Note a tensor's counter and version. They show at the second run whether the tensor was changed since."""
    if _is_strided(tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        with _disable_current_modes(), sharing_counters():  # the region's modes must not see this `detach`
            alias = tensor.detach()
            alias = alias.conj() if alias.is_conj() else alias  # a lazy view is no plain memory: see `Packer._save`
            alias = alias._neg_view() if alias.is_neg() else alias
            versions.append((version_probe(alias), tensor._version))


def _is_strided(tensor: Tensor) -> bool:
    plain_memory = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
    return type(tensor) in PLAIN_TYPES and plain_memory


def _unwrapped(function: Any) -> tuple[Any, nn.Module | None]:
    """Return the function behind partial arguments and decorators, and the module that it is, or is a method of."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", function)
    return function, owner if isinstance(owner, nn.Module) else None


class _Same:
    """One module, weakly, as it may compare equal to another, and have no hash."""

    __slots__ = ("_hash", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module, self._hash = weakref.ref(module), id(module)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        module = self._module()
        return isinstance(other, _Same) and module is not None and module is other._module()


def _alike(function: Any, given: list[Any]) -> Hashable:
    """Return what two runs of a region have in common that save as much; None if that cannot be known.

    Args:
        function: that runs: a module, or code.
        given: its arguments, and what it binds, of which tensors and modules count.
    """
    function, module = _unwrapped(function)
    alike: list[Hashable] = [getattr(function, "__code__", None) or type(function).__qualname__]
    for one in (module, *given):
        if isinstance(one, Tensor):
            if one.is_nested:  # its shape does not show its size
                return None
            alike.append((one.shape, one.dtype, one.requires_grad))
        elif isinstance(one, nn.Module):
            alike.append((_Same(one), one.training))
    return tuple(alike)


def _bound(function: Any) -> Iterator[Any]:
    """Yield the objects that a function binds (partial arguments, closure): they exist before it runs."""
    while isinstance(function, functools.partial):
        yield function.args
        yield function.keywords
        function = function.func
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _with_contexts(given: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments of PyTorch's generator function, with contexts made, and whether the region may run once.

    A first context of the program's own (torch_remat's, TransformerEngine's) may record facts for a second run, or
    expect one. Only PyTorch's selective contexts are known to do no more than cache tensors for it.
    """
    named = "context_fn" in options
    context_fn = options["context_fn"] if named else given[2] if len(given) > 2 else None
    if not callable(context_fn) or context_fn is plain.noop_context_fn:  # `given[2]` may be the function's `kwargs`
        return given, options, True
    contexts = context_fn()
    kind = type(contexts[0])
    if kind in CACHING_MODES:
        contexts = CACHING_MODES[kind](contexts)

    def made() -> Any:
        return contexts

    given, options = (given, {**options, "context_fn": made}) if named else ((*given[:2], made, *given[3:]), options)
    return given, options, kind is nullcontext or kind in CACHING_MODES


# -- in PyTorch's place -----------------------------------------------------------------------------------------------

_everywhere: weakref.WeakValueDictionary[int, Checkpoints] = weakref.WeakValueDictionary()
"""By the ``id`` of their `Forwards`, which they hold: after an interrupt those of the new store replace those of the
ended one, which a graph may keep alive."""


class _Original:
    """PyTorch's own generator function, once this module has replaced it."""

    lock = renewed_in_child(threading.Lock())
    function: Callable[..., Body]


def everywhere() -> list[Checkpoints]:
    """Return the checkpoints of all offloaders."""
    with _Original.lock:
        return list(_everywhere.values())


def innermost(found: Iterable[Checkpoints]) -> Checkpoints | None:
    """Return those of the offloader whose hooks are on top, or None: autograd calls no hooks but these."""
    above = top()
    return next((one for one in found if above is not None and one.forwards.innermost_hook is above[0]), None)


def _planned() -> list[Checkpoints]:
    """Return those among which plans may choose; none if PyTorch's own function has to run in any case."""
    if top() is None or not torch.is_grad_enabled() or must_be_plain():
        return []
    return [one for one in everywhere() if one.planned]


def _in_its_place(*given: Any, **options: Any) -> Body:
    """Return the generator around a region's first run: PyTorch's own, unless an offloader's hooks are innermost."""
    planned = _planned()
    for checkpoints in planned:
        region = checkpoints.region
        if region is not None:
            # A nested checkpoint always runs again. Both runs of the region must save the same tensors, and in the
            # second run PyTorch's own generator serves the nested checkpoint.
            return checkpoints.counted(region, True, given, options)
    found = innermost(planned)
    if found is not None:
        given, options, is_free = _with_contexts(given, options)
        if is_free:
            return found.run(given, options)
    return _Original.function(*given, **options)


@untraced
def _count_reentrant() -> None:
    """Count a reentrant checkpoint that begins, for the offloader whose hooks are innermost."""
    found = innermost(_planned())
    if found is not None:
        found.forwards.stack[-1].reentrant += 1


def _counting(reentrant: Any) -> Any:
    """Return the ``apply`` of PyTorch's class of reentrant checkpoints, which counts them and else does as before."""

    # The class is bound here, as a program may put another one into its place. Dynamo and pickle look at the name.
    @untraced_frame
    def apply(kind: Any, *given: Any, **options: Any) -> Any:
        _count_reentrant()
        return super(reentrant, kind).apply(*given, **options)

    return classmethod(apply)


def install() -> str:
    """Replace PyTorch's generator function, for the rest of the process. Return "", or why that is impossible."""
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
        _Original.function = found  # first, as another thread may call the replacement at once
        setattr(plain, name, _in_its_place)
        reentrant: Any = plain.CheckpointFunction
        if "apply" not in vars(reentrant):  # a program's own stays
            reentrant.apply = _counting(reentrant)
        composable: Any = sys.modules.get("torch.distributed._composable.checkpoint_activation")
        if getattr(composable, name, None) is found:  # that module imported the function by name
            setattr(composable, name, _in_its_place)
    return ""
