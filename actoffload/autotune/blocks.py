"""The repeated blocks of a model: found, and watched while they run."""

from __future__ import annotations

import copyreg
import functools
import inspect
import random
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import ConfigError
from ..runtime.profiler import Profiler
from ..runtime.untraced import Hooking, untraced

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_CODE = (type, FunctionType, MethodType, ModuleType)
_BOOKKEEPING = ("actoffload.", "torch.")
"""Whose objects a forward does not compute with, such as FSDP's; modules are looked into all the same."""
_CACHE_ARGUMENTS = ("past_key_values", "use_cache")
_PLAIN = (bool, int, float, str, bytes)
MOST_PARTS = 20_000
"""So many parts of what a block can reach are looked at, the nearest first."""


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by qualified name: the members of every outermost container of equals.

    A container of equals is a ``ModuleList``, ``ModuleDict`` or ``Sequential`` with two or more members of one class
    that have parameters: the layers of a transformer, the encoder's and the decoder's apart.

    >>> sorted(find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    ['0', '1']
    """
    found: dict[str, nn.Module] = {}
    _collect(model, "", found)
    return found


def _collect(module: nn.Module, prefix: str, found: dict[str, nn.Module]) -> None:
    children = dict(module.named_children())
    kinds = {type(child) for child in children.values()}
    equals = isinstance(module, _CONTAINERS) and len(children) > 1 and len(kinds) == 1
    if equals and all(any(True for _ in child.parameters()) for child in children.values()):
        found.update({f"{prefix}{name}": child for name, child in children.items()})
        return
    for name, child in children.items():
        _collect(child, f"{prefix}{name}.", found)


def why_not_recomputed(block: nn.Module) -> str:
    """Why a block must not run twice in a step, as far as its modules show; empty when nothing speaks against it."""
    if type(block).__name__ == "OptimizedModule" or getattr(block, "_compiled_call_impl", None) is not None:
        return "compiled"
    for module in block.modules():
        statistics = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        if statistics and module.training:
            return "running statistics would be updated twice"
    return ""


class Proof:
    """A listener that fails where a block of a plan that was given changes what its second run would see.

    It looks at the first forward of each such block that wants gradients.

    Args:
        names: the blocks that the plan recomputes.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._unproven = set(self._names)

    def begin_anew(self) -> None:
        """Another model has blocks of these names: nothing is known of them."""
        self._unproven = set(self._names)

    @property
    def active(self) -> bool:
        """Whether there are blocks that it has not seen."""
        return bool(self._unproven)

    def block_began(self, name: str, inputs: Mapping[int, Tensor]) -> None:
        """The forward of a block begins; ``inputs``: the tensors it was given, by their place in `tree_leaves`."""

    def block_ended(self, name: str, *, repeatable: bool) -> None:
        """It has ended; ``repeatable``: as far as its modules and buffers show, running it twice is the same.

        Raises:
            ConfigError: the block may not be run twice.
        """
        if not torch.is_grad_enabled():
            return  # an evaluation, in which a block may do otherwise
        if name in self._unproven and not repeatable:
            remedy = "its forward changes buffers, arguments, attributes or a random state: run twice it would give "
            remedy += "other gradients; plan anew, and this block will not be recomputed"
            raise ConfigError("policy", f"a plan that recomputes {name!r}", remedy)
        self._unproven.discard(name)


class BlockWatch(Hooking):
    """Tells a listener of the blocks of models as they run.

    Args:
        listener: told of them, on the thread that runs them, in forward only.
        recomputes: blocks may be recomputed. A model of Transformers' then makes no cache of keys and values in a
            training forward that asks for none, as under its own checkpointing: a block that adds to one cannot run
            twice.
    """

    def __init__(self, listener: Profiler | Proof, *, recomputes: bool = False) -> None:
        super().__init__()
        self._recomputes = recomputes
        self.blocks: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        self._listener = listener
        self._local = threading.local()

    def watch(self, model: nn.Module) -> None:
        """Watch the blocks of a model from now on."""
        if model in self._hooks:
            return
        handles = self._hooks[model] = []
        for name, block in find_blocks(model).items():
            name = self._free_name(name, block)
            self.blocks[name] = block
            enter = functools.partial(self.enter, name)
            handles.append(block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(block.register_forward_hook(self.leave, always_call=True))
        for module, place in _with_caches(model) if self._recomputes else ():
            without = functools.partial(self.without_cache, place)
            handles.append(module.register_forward_pre_hook(without, with_kwargs=True))

    @untraced
    def without_cache(self, place: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return a training forward's arguments with ``use_cache=False``; None where it makes no cache, or is to."""
        trains = module.training and torch.is_grad_enabled() and getattr(module.config, "use_cache", False)
        asks = len(args) > place or any(kwargs.get(name) is not None for name in _CACHE_ARGUMENTS)
        return (args, {**kwargs, "use_cache": False}) if trains and not asks else None

    def _free_name(self, name: str, block: nn.Module) -> str:
        """The name of a block, with a number where another model has a block of that name."""
        free, count = name, 1
        while self.blocks.get(free, block) is not block:
            count += 1
            free = f"{name}#{count}"
        return free

    def forget(self, model: nn.Module) -> None:
        """Watch the blocks of a model no more."""
        super().forget(model)
        gone = set(find_blocks(model).values())
        for name in [name for name, block in self.blocks.items() if block in gone]:
            del self.blocks[name]

    @untraced
    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward of a block begins."""
        if not self._listener.active or torch._C._current_graph_task_id() != -1:
            return  # nobody listens, or a recomputation
        if not hasattr(self._local, "running"):
            self._local.running = []
        leaves = tree_leaves((args, kwargs))
        given = enumerate(leaves)
        tensors = {place: leaf for place, leaf in given if isinstance(leaf, Tensor) and not leaf.is_inference()}
        self._local.running.append(_Running(name, module, [module, *leaves], _seen([module, *leaves])))
        self._listener.block_began(name, tensors)

    @untraced
    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """It has ended."""
        running: list[_Running] = getattr(self._local, "running", [])
        if running and running[-1].module is module:
            block = running.pop()
            self._listener.block_ended(block.name, repeatable=block.unchanged() and not why_not_recomputed(module))


def _with_caches(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The outermost modules that may make a cache, and at which place their arguments for it begin."""
    if why_not_recomputed(model) == "compiled":
        return
    try:
        names = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # a forward that is not Python's
        names = []
    if hasattr(getattr(model, "config", None), "use_cache") and set(_CACHE_ARGUMENTS) <= set(names):
        yield model, min(map(names.index, _CACHE_ARGUMENTS))
    else:
        for child in model.children():
            yield from _with_caches(child)


class _Running(NamedTuple):
    """A block whose forward runs, and what it has to leave as it found it to be run again."""

    name: str
    module: nn.Module
    reached: list[Any]
    """The module and its arguments; a list or a dictionary of arguments is another one when the block runs again."""
    state: list[Any]

    def unchanged(self) -> bool:
        """Whether the forward has left everything as it was, as far as that can be seen."""
        return not differ(_seen(self.reached), self.state)


def _seen(reached: list[Any]) -> list[Any]:
    """Return what a forward may change of its module and arguments, and of Python's random numbers."""
    attributes = [vars(leaf) for leaf in reached if isinstance(leaf, Tensor)]  # of a copy for the second run: none
    return [hash(random.getstate()), *(object() for held in attributes if held), *state_of(reached, versions=True)]


def state_of(reached: Iterable[Any], *, versions: bool = False) -> list[Any]:
    """Return all that these values hold, through containers and attributes, for `differ`.

    What can change unseen, an iterator or more than `MOST_PARTS` parts, differs from itself.

    Args:
        reached: where to begin.
        versions: tensors that were changed in place differ, too.
    """
    found: list[Any] = []
    left, seen = deque(reached), set[int]()
    while left:
        value = left.popleft()
        kind = type(value)  # not what a proxy stands for
        if issubclass(kind, tuple):
            found.append(len(value))
            left.extend(value)
            continue
        if len(found) > MOST_PARTS or hasattr(kind, "__next__"):
            found.append(object())
            break
        found.append(value)
        if issubclass(kind, Tensor):
            found.append(0 if value.is_inference() or not versions else value._version)
        elif issubclass(kind, torch.Generator):
            found.append(bytes(value.get_state().numpy()))
        elif id(value) not in seen:  # of what is found, which keeps it alive
            seen.add(id(value))
            left.extend(_parts(value, kind))
    return found


def _parts(value: Any, kind: type) -> Iterable[Any]:
    if issubclass(kind, dict):
        return [*value, *value.values()]
    if issubclass(kind, (list, set, frozenset, deque)):
        return list(value)
    bookkeeping = kind.__module__.startswith(_BOOKKEEPING) and not issubclass(kind, nn.Module)
    if bookkeeping or issubclass(kind, _CODE):
        return ()
    slots = [getattr(value, name) for name in copyreg._slotnames(kind) if hasattr(value, name)]  # type: ignore[attr-defined]
    held = dict(vars(value)) if kind.__dictoffset__ else {}
    if issubclass(kind, nn.Module):  # hooks come and go, ours too; what they change is seen
        held = {name: one for name, one in held.items() if name != "forward" and "_hooks" not in name}
    if kind.__module__.startswith("torch.distributed."):  # FSDP 1 notes what it does at its own modules
        held = {"_modules": held.get("_modules")}
    elif held.get("_is_fsdp_managed_module"):  # what it gathers may be another tensor each time
        del held["_parameters"]
        held = {name: one for name, one in held.items() if not isinstance(one, Tensor)}
    return [*slots, *held.values()]


def differ(after: list[Any], before: list[Any]) -> bool:
    """Whether two results of `state_of` differ."""
    return len(after) != len(before) or not all(map(_same, after, before))


def _same(after: Any, before: Any) -> bool:
    return after is before or (type(after) is type(before) and isinstance(after, _PLAIN) and after == before)
