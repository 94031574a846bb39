"""The trace of one offloader over time: phases, transfers, waits, plans, memory by its use, processors and drives.

`TraceWriter` writes all of it. A thread samples memory, with at most `LOOKING_SHARE` of a processor. Besides, memory is
sampled as a phase begins or ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ..config import OffloadConfig, check_file
from ..events import EventKind, TraceEvent, now
from ..memory.process_memory import rss_bytes
from ..policy import part_of
from ..storage.spool_files import bytes_by_all
from ..storage.transfers import Transfer
from ..tiers.shared import Shared
from ..tiers.tiers import Tiers
from ..tiers.timers import traced
from ..version import __version__
from .backward_end import BackwardEnd
from .trace_writer import TraceWriter, writer_for
from .untraced import skipped

VARIABLE = "ACTOFFLOAD_TRACE"
LOOKING_SHARE = 0.003
"""The thread that writes the samples takes up to twice as much: in all less than 1 % of a processor."""
LEAST_LOOK_S = 0.005
LEAST_RATE_S = 0.001
"""A rate over less time would be noise."""

_UNWANTED = (EventKind.PACK, EventKind.WRITE, EventKind.READ, EventKind.RELEASE, EventKind.KEEP)
"""Events that a trace does not need: it has the transfers, and the bytes by reason to stay."""
_WAITS = {EventKind.UNPACK_WAIT: "wait for data", EventKind.PACK_WAIT: "wait for room"}
_NOTES = {EventKind.FORWARD: "used from memory", EventKind.CANCEL: "write cancelled"}


def trace_path(config: OffloadConfig) -> str | None:
    """Return the file of the trace, from the options or ``ACTOFFLOAD_TRACE``; one of several ranks is in its name.

    Raises:
        ConfigError: no file can be written at the path in ``ACTOFFLOAD_TRACE``.
    """
    given = os.environ.get(VARIABLE) if config.trace is None else config.trace
    if not given or callable(given):
        return None
    check_file(VARIABLE, given)
    rank, ranks = rank_and_ranks()
    stem, suffix = os.path.splitext(os.fspath(given))
    return f"{stem}.rank{rank}{suffix}" if ranks > 1 else f"{stem}{suffix}"


def rank_and_ranks() -> tuple[int, int]:
    """Return this process's global rank, and the number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


class Recorder:
    """Records one offloader's steps. It is the sink of its events, which come with the store's lock held."""

    def __init__(self, path: str, shared: Shared, tiers: Tiers) -> None:
        self._shared = shared
        self._tiers = tiers
        self.ask: Callable[[], Callable[[], dict[str, Any]] | None] = lambda: None
        """Returns a function for the facts at the end of the run, ready for JSON; None once its owner is gone."""
        self._backward_end = BackwardEnd(self._backward_ended)
        self._memory = MemoryUse(tiers.by_device)
        self._gradients_due_s = 0.0
        self._written_bytes: dict[str, int] = {}
        self._looking = threading.RLock()
        self._closed = threading.Event()
        self._looker = threading.Thread(
            target=_look_often, args=(weakref.ref(self), self._closed), name="actoffload-trace-memory", daemon=True
        )
        self._timeline = tiers.start_timeline()
        self._writer = writer_for(path, _about_the_run(shared.config))
        self._running = self._writer.running
        self._usage = Usage(self._writer, frozenset() if tiers.spool is None else tiers.spool.devices())
        shared.accounts.resident_by_module = self._memory.saved
        shared.reporter.sink, shared.reporter.unwanted = self.event, _UNWANTED
        if tiers.spool is not None:
            tiers.spool.on_moved = self.moved
        self._hooks = [  # weakly: these hooks are for the whole process, and must not keep a dropped recorder
            register_optimizer_step_pre_hook(functools.partial(_tell, weakref.WeakMethod(self.optimizer_begins))),
            register_optimizer_step_post_hook(functools.partial(_tell, weakref.WeakMethod(self.optimizer_ended))),
        ]

    # -- events -------------------------------------------------------------------------------------------------------

    def event(self, event: TraceEvent) -> None:
        """Record an event of a saved storage: the sink."""
        args = {"module": event.module, "bytes": event.nbytes}
        if event.kind in _WAITS:
            track, end_s = f"waits, {self._running.name}", event.time_s + event.duration_s
            self._writer.span(track, _WAITS[event.kind], event.time_s, end_s, args)
        elif event.kind is EventKind.PLAN:
            self._writer.instant("notes", event.detail, event.time_s)
        else:
            name = _NOTES.get(event.kind, f"{event.kind.value}: {event.detail}")
            self._writer.instant("notes", name, event.time_s, args)

    def moved(self, transfer: Transfer) -> None:
        """Record a transfer of the spool that has moved bytes."""
        tensors = [traced(record, record.nbytes) for record in transfer.records]
        self._transfer(f"disk {transfer.kind.value}", transfer.began_s, now(), tensors, transfer.moved_bytes)

    def _transfer(self, link: str, begin_s: float, end_s: float, tensors: list[Any], nbytes: int) -> None:
        name = (tensors[0][0] or "saved tensor") if tensors else "bytes"
        args = {"bytes": nbytes, "tensors": tensors}
        self._writer.span(f"{link}*", name + (f" +{len(tensors) - 1}" if tensors[1:] else ""), begin_s, end_s, args)

    # -- phases -------------------------------------------------------------------------------------------------------

    def watch(self, model: nn.Module) -> None:
        """Count a model's parameters, buffers and gradients apart from other memory."""
        self._memory.models.add(model)

    def forward_begins(self) -> None:
        """Record that a context is entered."""
        self._writer.forward_s = now()
        self._take_timeline()
        self._memory.count()
        self._memory.count_gradients()
        self.look()
        self._begin("forward")

    def forward_ended(self) -> None:
        """Record that the context is left."""
        self.look()
        self._end("forward")

    def backward(self, number: int) -> None:
        """Record that backward unpacks a tensor that the forward of micro-batch ``number`` saved."""
        running = next((phase for phase in self._running.phases if phase.name == "backward"), None)
        if running is not None and running.begin_s < self._writer.forward_s:  # it raised, and so had no end
            self._end("backward", running.last_s)
        elif running is not None:
            running.last_s = begin_s = now()
            if begin_s >= self._gradients_due_s:
                self._memory.count_gradients(torch.accelerator.current_device_index() if self._memory.on_device else 0)
                self._gradients_due_s = now() + max(LEAST_LOOK_S, (now() - begin_s) / LOOKING_SHARE)
            return
        if self._backward_end.expect():
            self._begin("backward", number)

    def _backward_ended(self) -> None:
        self._memory.count_gradients()
        self.look()
        self._end("backward")

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Record that an optimizer's step begins."""
        self._memory.count_gradients()
        self._memory.optimizers.add(optimizer)
        before = next((phase for phase in self._running.phases if phase.optimizer == id(optimizer)), None)
        if before is not None and before.teller != id(self):
            return  # another offloader with the same file has recorded this step
        if before is not None:  # the optimizer's last step raised, and had no end of its own
            self._end(before.name, before.last_s)
        within = any(phase.name == "optimizer" for phase in self._running.phases)  # another optimizer calls this one
        if not within:
            self.look()
        on_host = all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
        for around in self._running.phases:  # DeepSpeed's step around this one, which is no optimizer of PyTorch's
            around.on_host |= on_host and around.name == "optimizer" and not around.optimizer
        phase = self._begin(f"{type(optimizer).__name__}.step" if within else "optimizer")
        phase.optimizer, phase.teller, phase.on_host = id(optimizer), id(self), on_host

    def optimizer_ended(self, optimizer: Optimizer) -> None:
        """Record the end of an optimizer's step."""
        self._memory.count_gradients()
        self._memory.count()
        self.look()
        ours = (id(optimizer), id(self))
        phase = next((phase for phase in self._running.phases if (phase.optimizer, phase.teller) == ours), None)
        if phase is not None:
            self._end(phase.name)

    @contextlib.contextmanager
    def region(self, name: str, link: str, nbytes: int) -> Iterator[None]:
        """Record the code inside of the context as a phase, or as bytes that the program moves over a link."""
        begin_s = now()
        if not link:
            self.look()
            self._begin(name)
        try:
            yield
        finally:
            if link:
                self._writer.span(f"{link}, by others*", name, begin_s, now(), {"bytes": nbytes, "tensors": []})
            else:
                self.look()
                self._end(name)

    def _begin(self, name: str, number: int | None = None) -> _Running:
        index = self._timeline.current_index() if self._timeline is not None else None
        moment = self._timeline.moment(index) if self._timeline is not None and index is not None else None
        phase = _Running(name, now(), number, index, moment, now())
        self._running.phases.append(phase)
        return phase

    def _end(self, name: str, end_s: float | None = None) -> None:
        """End the innermost phase of this name, and the phases in it, which have no end as they raised."""
        phases, end_s = self._running.phases, now() if end_s is None else end_s
        if not any(phase.name == name for phase in phases):
            return
        while phases:
            phase = phases.pop()
            args = {"microbatch": self._shared.accounts.microbatches if phase.number is None else phase.number}
            self._writer.span(f"phases, {self._running.name}", phase.name, phase.begin_s, end_s, args)
            if self._timeline is not None and phase.index is not None:
                moment = self._timeline.moment(phase.index)
                # The device has no part in an optimizer's step on the host, which only ends there.
                begin = moment if phase.on_host else phase.moment
                self._timeline.add(phase.name, phase.index, begin, moment, args)
            if phase.name == name:
                return

    def _take_timeline(self, *, wait: bool = False) -> None:
        """Record the copies and phases that the device has completed; ``wait``: for all of them."""
        for what, begin_s, end_s, about in self._timeline.take(wait=wait) if self._timeline is not None else ():
            if what in ("host write", "host read"):
                self._transfer(what, begin_s, end_s, list(about), sum(tensor[1] for tensor in about))
            elif isinstance(about, Mapping):
                self._writer.span("device phases*", what, begin_s, end_s, about)
            else:
                module, nbytes = about[0] if about else (None, 0)
                self._writer.span("device waits*", what, begin_s, end_s, {"module": module or "", "bytes": nbytes})

    # -- counters -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Sample the use of memory, unless another thread is doing so."""
        if self._looking.acquire(blocking=False):  # no thread of the program waits for a sample
            try:
                if not self._closed.is_set():
                    self._look()
                    if self._looker.ident is None:
                        self._looker.start()
            finally:
                self._looking.release()

    def _look(self) -> None:
        accounts = self._shared.accounts
        begin_s, total = now(), self._memory.total()
        unneeded = 0 if self._memory.on_device else self._tiers.unneeded_bytes()
        self._writer.counter("memory", begin_s, self._memory.values(total, accounts.resident_bytes))
        self._writer.counter("memory total", begin_s, {"bytes": total})
        unmoved = total - unneeded + accounts.baseline_bytes - accounts.resident_bytes
        self._writer.counter("memory with nothing moved", begin_s, {"bytes": unmoved})
        if self._memory.on_device:
            self._writer.counter("process memory", begin_s, {"bytes": rss_bytes()})
        pools = sum(pool.slots.allocated_bytes for pool in self._tiers.pools)
        disk = self._tiers.spool.allocated_bytes if self._tiers.spool is not None else 0
        kept_free = self._memory.reserved() - total if self._memory.on_device else unneeded
        for name, nbytes in (("host pool", pools), ("disk", disk), ("kept free", kept_free)):
            if nbytes != self._written_bytes.get(name):
                self._written_bytes[name] = nbytes
                self._writer.counter(name, begin_s, {"bytes": nbytes})
        self._usage.add()
        if self._writer.failed:
            self._shared.reporter.advise("trace", f"the trace ends early: {self._writer.failed}")

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, *, wait: bool, ask: bool) -> None:
        """End the trace. Idempotent.

        ``wait``: for copies that are under way, to know their times. ``ask``: write the facts at the end; not after an
        interrupt, which may have left locks held.
        """
        with self._looking:  # the wait is short: a sample takes no other lock, and less than a millisecond
            if self._closed.is_set():
                return
            self._closed.set()
            self._usage.end()
        self._stop()
        self._take_timeline(wait=wait)
        known: dict[str, Any] = {}
        tell = self.ask() if ask else None
        if tell is not None:
            try:
                known = tell()
                known["spool"] = None if self._tiers.spool is None else asdict(self._tiers.spool.statistics())
            except Exception as error:  # a device that broke, say
                known["not_known"] = repr(error)
        self._writer.close(known)

    def after_fork_in_child(self) -> None:
        """Record nothing more, and query no time of the device: file and device are the parent's."""
        self._looking, self._closed = threading.RLock(), threading.Event()  # a thread of the parent may hold the old
        self._closed.set()
        self._stop()
        self._timeline = None

    def _stop(self) -> None:
        self._shared.reporter.sink = self._shared.accounts.resident_by_module = None
        if self._tiers.spool is not None:
            self._tiers.spool.on_moved = None
        for hook in self._hooks:
            hook.remove()


@dataclass(slots=True, eq=False)
class _Running:
    """A phase that runs."""

    name: str
    begin_s: float
    number: int | None  # of the micro-batch; None: of the last micro-batch at the end of the phase
    index: int | None  # of the device, None before the first tensor
    moment: Any  # of the beginning there
    last_s: float  # when it was last seen to run
    optimizer: int = 0  # the id of the optimizer that steps
    teller: int = 0  # the id of the recorder that records the step
    on_host: bool = False  # all that it steps lies in host memory


class Usage:
    """The use of processors, and of the block devices with these numbers, over time, as counters of a trace."""

    def __init__(self, writer: TraceWriter, drives: frozenset[int]) -> None:
        self._writer, self._drives = writer, drives
        self._from_s, self._counts = now(), self._count()

    def add(self) -> None:
        """Record the use since the last call, as counters that begin there."""
        begin_s, end_s, before = self._from_s, now(), self._counts
        if end_s - begin_s < LEAST_RATE_S:
            return
        self._from_s, self._counts = end_s, self._count()
        for name, counts in self._counts.items():
            old = before.get(name, counts)
            rates = {each: (count - old[each]) / (end_s - begin_s) for each, count in counts.items()}
            self._writer.counter(name, begin_s, rates)

    def end(self) -> None:
        """Record the use since the last call, and none from now on."""
        self.add()
        for name, counts in self._counts.items():  # a rate lasts until the next one
            self._writer.counter(name, self._from_s, dict.fromkeys(counts, 0))

    def _count(self) -> dict[str, dict[str, float]]:
        """Return the processor time of all threads, and the bytes that all programs have moved on our drives."""
        moved = bytes_by_all(self._drives)
        return {"processors": {"in use": time.process_time()}} | ({} if moved is None else {"drives": {**moved}})


class MemoryUse:
    """The use of the device's memory, or of the process's on the CPU."""

    def __init__(self, device_types: Iterable[str]) -> None:
        self.saved: Counter[str | None] = Counter()  # bytes of activations by module; the tiers update it
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # their parameters and gradients count apart
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # their states count apart
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        default = accelerator.type if accelerator is not None else "cpu"
        self._type = default if default in (set(device_types) or {default}) else "cpu"
        self._index = 0
        self.on_device = self._type != "cpu"
        self._parameters: dict[int, list[tuple[weakref.ref[Tensor], int]]] = {}
        """By the index of their device, with their bytes."""
        self._gradient_bytes: dict[int, int] = {}
        self._parameter_bytes = self._state_bytes = 0
        self._counted: tuple[int, ...] = ()

    def count(self) -> None:
        """Count parameters, buffers and optimizer state if there are others than before; note the current device.

        A tensor that an optimizer steps and no model has counts as optimizer state.
        """
        if self.on_device:
            self._index = torch.accelerator.current_device_index()
        models, optimizers = list(self.models), list(self.optimizers)
        counted = (len(models), *(len(optimizer.state) for optimizer in optimizers))
        if counted == self._counted:
            return
        self._counted = counted
        parameters: dict[int, Tensor] = {id(p): p for model in models for p in model.parameters()}
        buffers = {id(b): b for model in models for b in model.buffers()}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        stepped: dict[int, Tensor] = {id(p): p for group in groups for p in group["params"]}
        leaves = tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
        states = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not parameters:
            parameters = stepped
        states += [p for number, p in stepped.items() if number not in parameters]
        self._parameters = {}
        for parameter in (parameters | stepped).values():
            on_device = self._parameters.setdefault(parameter.device.index or 0, [])
            on_device.append((weakref.ref(parameter), self._bytes(parameter)))
        self._parameter_bytes = sum(map(self._bytes, (parameters | buffers).values()))
        self._state_bytes = sum(map(self._bytes, states))

    def count_gradients(self, index: int | None = None) -> None:
        """Count the gradients that exist. Call it on the thread that makes them, as no lock guards a tensor's ``grad``.

        ``index``: the device of an autograd thread, which makes gradients on it alone; None: no backward runs.
        """
        for place, parameters in self._parameters.items():
            if index in (None, place):
                there = ((reference(), nbytes) for reference, nbytes in parameters)
                self._gradient_bytes[place] = sum(n for p, n in there if p is not None and p.grad is not None)

    def total(self) -> int:
        """Return the bytes that PyTorch has allocated on the device, or the resident bytes of the process."""
        return rss_bytes() if self._type == "cpu" else int(torch.accelerator.memory_allocated(self._index))

    def reserved(self) -> int:
        """Return the bytes on the device that PyTorch's allocator holds."""
        return int(torch.accelerator.memory_reserved(self._index))

    def values(self, total: int, resident_bytes: int) -> dict[str, int]:
        """Return the bytes by use. "other" is the rest of the total.

        ``resident_bytes``: saved activations on the device, also without a module.
        """
        values = {"parameters": self._parameter_bytes, "gradients": 0, "optimizer state": self._state_bytes}
        small = resident_bytes
        for module, nbytes in dict(self.saved).items():
            name = f"saved by {part_of(module)}"
            values[name] = values.get(name, 0) + nbytes
            small -= nbytes
        values["saved, small or recomputed"] = max(0, small)
        left = max(0, total - sum(values.values()))
        values["gradients"] = min(left, sum(self._gradient_bytes.values()))  # some may have died since the count
        values["other"] = left - values["gradients"]
        return values

    def _bytes(self, tensor: Tensor) -> int:
        if tensor.layout is not torch.strided:
            return 0  # a sparse tensor has no storage of its own
        if type(tensor) in (nn.Parameter, Tensor) or not hasattr(tensor, "__tensor_flatten__"):
            return tensor.nbytes if tensor.device.type == self._type else 0
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return sum(self._bytes(one) for one in inner if isinstance(one, Tensor))  # a DTensor lists its mesh as well


def _about_the_run(config: OffloadConfig) -> dict[str, Any]:
    rank, ranks = rank_and_ranks()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "cpu" if accelerator is None else accelerator.type
    plain = (str, int, float, bool, tuple, type(None))
    options = ((field.name, getattr(config, field.name)) for field in fields(config))
    return {
        "actoffload": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": psutil.virtual_memory().total,
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
        },
        "command": sys.argv,
        "rank": rank,
        "ranks": ranks,
        "virtual_device_time": device == "sim",
        "config": {name: value if isinstance(value, plain) else repr(value)[:200] for name, value in options},
    }


def _look_often(recorder: weakref.ref[Recorder], closed: threading.Event) -> None:
    """Have a recorder sample memory until it is closed or dropped: the work of its thread."""
    pause_s = LEAST_LOOK_S
    while not closed.wait(pause_s):
        there = recorder()
        if there is None:
            return
        begin_s = time.thread_time()
        there.look()
        pause_s = max(LEAST_LOOK_S, (time.thread_time() - begin_s) / LOOKING_SHARE)
        del there  # else this thread would keep a dropped recorder during the pause


@skipped
def _tell(told: weakref.WeakMethod[Callable[[Optimizer], None]], optimizer: Optimizer, *_: object) -> None:
    """Pass an optimizer's step to a recorder, while there is one."""
    method = told()
    if method is not None and not torch.compiler.is_compiling():
        method(optimizer)
