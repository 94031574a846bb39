"""One sample of what the hooks cost the training thread. The last line of output is one JSON object.

The options come as one JSON argument: ``kind`` (of `KINDS`, `STEP` or `DEFAULT_STEP`), ``tensors`` (saved and alive at
once), ``chains`` (how often that is done in one measurement), ``pairs`` (measurements with a bare pair of hooks and
with ours, in turns), ``path`` and, for ``moves``, ``nbytes`` of each tensor.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import actoffload
from actoffload.testing.gpt import GPT, GPTConfig

KINDS = {
    "parameter": "stays: a parameter",
    "small": "stays: below min_bytes",
    "policy": "stays: a policy keeps it",
    "moves": "moves, memory engine",
    "device": "moves to host, null device",
    "device kept": "stays on a null device: a policy keeps it",
}
STEP, DEFAULT_STEP = "step", "step, defaults"
"""Whole steps of a small GPT, against steps without the library: under a plan that keeps everything, and with the
default policy, of which the steps are measured once it runs some without hooks."""
MOST_STEPS = 200
"""Steps after which the default policy has run some without hooks."""
REASONS = {
    "parameter": "parameter", "small": "below min_bytes", "policy": "policy", "moves": None, "device": None,
    "device kept": "policy",
}  # fmt: skip
"""Why each kind stays, in ``Statistics.kept_bytes``."""
ELEMENTS = 4
PARAMETERS = 64
PLENTY = "64GiB"
"""No limit: nothing may stay for want of room."""

Forward = Callable[[], Tensor]
ContextManager = Callable[[], AbstractContextManager[Any]]


class _NoHook(nullcontext[None]):
    """Nothing is remembered from one of the device's calls to the next."""

    depth = 0
    recorded = None


def _nothing(*_: Any) -> None:
    """Nothing is done, and nothing is known."""


def _no(*_: Any) -> bool:
    return False


def _yes(*_: Any) -> bool:
    return True


class NullDevice:
    """An accelerator that does nothing, and counts what it is asked: CPU tensors lie on it.

    Events are numbers. One has happened when ``LAG`` others have been recorded after it.
    """

    LAG = 4
    type = "cpu"

    def __init__(self) -> None:
        self.hook = _NoHook()
        self.asked: Counter[str] = Counter()
        self._recorded = 0

    def current_index(self) -> int:
        return 0

    def current_stream(self, index: int) -> str:
        return "compute"

    def side_stream(self, index: int, role: str) -> str:
        return role

    def record(self, stream: str) -> int:
        self.asked["records"] += 1
        self._recorded += 1
        return self._recorded

    timestamp = record

    def seconds_between(self, begin: int, end: int) -> float:
        return 0.0

    def wait(self, stream: str, event: int) -> None:
        self.asked["waits"] += 1

    def done(self, event: int) -> bool:
        self.asked["queries"] += 1
        return event + self.LAG <= self._recorded

    def synchronize(self, event: int) -> None:
        self.asked["synchronizations"] += 1

    def copy(self, copies: Collection[Any], stream: str) -> None:
        self.asked["copies"] += len(copies)

    def empty(self, nbytes: int, index: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def used_on(self, tensor: Tensor, stream: str) -> None:
        self.asked["reports"] += 1

    capturing = is_of_a_graph = _no
    pin = unpin = _yes
    usable_bytes = memory_info = allocated_bytes = allocator_counts = reset_peak = stay_near = _nothing

    def bind(self, work: Any, index: int) -> Any:
        return work


class Save(torch.autograd.Function):
    """Saves a tensor and computes nothing with it, so that only saving is timed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.saved_tensors  # noqa: B018 - unpacking is what is measured
        return grads[0], None


def make_forward(kind: str, tensors: int, nbytes: int) -> Forward:
    """A forward that saves exactly so many tensors."""
    x = torch.ones(ELEMENTS, requires_grad=True)
    if kind == "moves":

        def save() -> Tensor:
            h = x
            for _ in range(tensors):  # nobody else holds what is saved, else it is not read back
                h = Save.apply(h, torch.empty(nbytes // 4))
            return h

        return save
    weights = [nn.Parameter(torch.ones(ELEMENTS), requires_grad=False) for _ in range(PARAMETERS)]

    def chain() -> Tensor:
        h = x.clone()  # a leaf would count as a parameter
        if kind == "parameter":
            for i in range(tensors):
                h = h * weights[i % PARAMETERS]  # saves the weight alone
        else:
            for _ in range(tensors):
                h = h.sin()  # saves its input
        return h

    return chain


def make_offloader(kind: str, tensors: int, path: str, device: NullDevice) -> actoffload.Offloader:
    """An offloader that does with every tensor of the forward what ``kind`` says."""
    options: dict[str, Any] = {"min_bytes": 1 << 20 if kind == "small" else 1, "policy": "all"}
    if REASONS[kind] == "policy":
        kept = [{"index": index, "nbytes": ELEMENTS * 4, "action": "keep"} for index in range(tensors)]
        none = json.loads(actoffload.Plan(()).to_json())
        options["policy"] = actoffload.Plan.from_json(json.dumps({**none, "entries": kept}))
    if kind.startswith("device"):
        # The window lets memory go once so much waits, after four batches of 16 copies.
        window = 4 * 16 * ELEMENTS * 4
        config = actoffload.OffloadConfig(target="host", path=path, host_budget=PLENTY, pending_bytes=window, **options)
        return actoffload.Offloader(config, accelerator=cast(Any, device))
    config = actoffload.OffloadConfig(
        target="nvme", engine="memory", path=path, devices="cpu", pending_bytes=PLENTY, host_budget=PLENTY, **options
    )
    return actoffload.Offloader(config)


def measure_steps(spec: dict[str, Any]) -> dict[str, Any]:
    """Steps of a GPT of 4 blocks of width 128, alone and with the library, in turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    default = spec["kind"] == DEFAULT_STEP
    size = (4, 64) if default else (8, 256)  # of so few tokens nothing is worth moving
    model, tokens = GPT(GPTConfig(layers=4, width=128)), torch.randint(0, 256, size)
    path = spec.get("path") or tempfile.gettempdir()
    options: dict[str, Any] = {"target": "nvme", "engine": "memory", "path": path, "devices": "cpu"}

    def forward() -> Tensor:
        logits: Tensor = model(tokens)
        return logits.square().mean()

    if default:
        offloader = actoffload.Offloader(actoffload.OffloadConfig(announce="none", **options)).use(model)
        # No garbage collection here: it makes steps so long that hooks cost too little of one for the planner to drop.
        for _ in range(MOST_STEPS):
            once(forward, lambda: offloader, _nothing, 1)
            if offloader.statistics().unhooked:
                break
    else:
        with actoffload.Offloader(actoffload.OffloadConfig(policy="all", **options)) as first:
            saved = forward()
        del saved
        entries = [replace(entry, action="keep", reason="") for entry in first.plan.entries]
        first.close()
        offloader = actoffload.Offloader(actoffload.OffloadConfig(policy=actoffload.Plan(tuple(entries)), **options))
        offloader.use(model)
    pairs = in_turns(forward, nullcontext, lambda: offloader, _nothing, 1, spec["pairs"])
    statistics = offloader.statistics()
    offloader.close()
    kept = not statistics.moved_bytes and statistics.kept_bytes.get("policy")
    if not (statistics.unhooked if default else kept):
        return {"error": f"not what was to be measured: {statistics.as_dict()}"}
    tensors = statistics.packed_tensors // (statistics.steps - statistics.unhooked)
    return {"kind": spec["kind"], "tensors": tensors, "pairs": pairs, "statistics": statistics.as_dict()}


def in_turns(
    forward: Forward, bare: ContextManager, ours: ContextManager, settle: Callable[[], None], chains: int, pairs: int
) -> list[dict[str, dict[str, float]]]:
    """Pairs of measurements, as of `once`, each after a garbage collection. A first pair is not counted."""
    taken: list[dict[str, dict[str, float]]] = []
    for _ in range(pairs + 1):
        taken.append({})
        for name, hooks in ("bare", bare), ("ours", ours):
            gc.collect()
            taken[-1][name] = once(forward, hooks, settle if name == "ours" else _nothing, chains)
    return taken[1:]


def once(forward: Forward, hooks: ContextManager, settle: Callable[[], None], chains: int) -> dict[str, float]:
    """Seconds of forward and backward, ``chains`` times; what settles in between is not counted."""
    seconds = {"wall_s": 0.0, "thread_s": 0.0}
    for _ in range(chains):
        with timed(seconds), hooks():
            out = forward()
        settle()
        direction = torch.ones_like(out)
        with timed(seconds):
            out.backward(direction)
            del out
    return seconds


@contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """Add the wall-clock time and the processor time of this thread in the block to ``seconds``."""
    wall_s, thread_s = time.perf_counter(), time.thread_time()
    yield
    seconds["wall_s"] += time.perf_counter() - wall_s
    seconds["thread_s"] += time.thread_time() - thread_s


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """All pairs of one sample, after one of each that is not counted."""
    if spec["kind"] in (STEP, DEFAULT_STEP):
        return measure_steps(spec)
    torch.set_num_threads(1)
    kind, tensors, chains = spec["kind"], spec["tensors"], spec["chains"]
    forward = make_forward(kind, tensors, spec.get("nbytes") or 0)
    device = NullDevice()
    offloader = make_offloader(kind, tensors, spec.get("path") or tempfile.gettempdir(), device)
    settle = _nothing if kind == "device" else offloader.synchronize  # a device's stream orders itself
    bare = functools.partial(saved_tensors_hooks, _same, _same)
    pairs = in_turns(forward, bare, lambda: offloader, settle, chains, spec["pairs"])
    offloader.synchronize()
    statistics = offloader.statistics()
    offloader.close()
    saved = tensors * chains * (len(pairs) + 1)
    moved = statistics.nvme_read_bytes + statistics.host_read_bytes > 0
    reasons = {REASONS[kind]} - {None}
    if statistics.packed_tensors != saved or moved == bool(reasons) or set(statistics.kept_bytes) != reasons:
        return {"error": f"not what was to be measured: {statistics.as_dict()}"}
    calls = {name: count / saved for name, count in device.asked.items()}
    return {"tensors": tensors * chains, "pairs": pairs, "calls": calls, "statistics": statistics.as_dict()}


def _same(tensor: Tensor) -> Tensor:
    """A hook that does nothing: what PyTorch itself pays for hooks."""
    return tensor


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
