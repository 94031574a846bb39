"""One sample of what the hooks cost the training thread. The last line of output is one JSON object.

The options come as one JSON argument: ``kind`` (of `KINDS`), ``tensors`` (saved and alive at once), ``chains`` (how
often that is done in one measurement), ``pairs`` (measurements with a bare pair of hooks and with ours, in turns),
``path`` and, for ``moves``, ``nbytes`` of each tensor.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import actoffload

KINDS = {
    "parameter": "stays: a parameter",
    "small": "stays: below min_bytes",
    "policy": "stays: a policy keeps it",
    "moves": "moves, memory engine",
}
REASONS = {"parameter": "parameter", "small": "below min_bytes", "policy": "policy", "moves": None}
"""Why each kind stays, in ``Statistics.kept_bytes``."""
ELEMENTS = 4
PARAMETERS = 64
CALLS = 100_000
PLENTY = "64GiB"
"""No limit: nothing may stay for want of room."""

Forward = Callable[[], Tensor]


class Save(torch.autograd.Function):
    """Saves a tensor and computes nothing with it, so that only saving is timed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        """Returns ``x``."""
        ctx.save_for_backward(saved)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Asks for what was saved."""
        ctx.saved_tensors  # noqa: B018 - unpacking is what is measured
        return grads[0], None


def make_forward(kind: str, tensors: int, nbytes: int) -> Forward:
    """A forward that saves exactly so many tensors."""
    x = torch.ones(ELEMENTS, requires_grad=True)
    if kind == "moves":
        values = [torch.ones(nbytes // 4) for _ in range(tensors)]

        def save() -> Tensor:
            h = x
            for value in values:
                h = Save.apply(h, value)
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


def make_offloader(kind: str, tensors: int, path: str) -> actoffload.Offloader:
    """An offloader that does with every tensor of the forward what ``kind`` says."""
    options: dict[str, Any] = {"min_bytes": 1 << 20 if kind == "small" else 1, "policy": "all"}
    if kind == "policy":
        entry = {"nbytes": ELEMENTS * 4, "action": "keep"}
        entries = [{"index": index, **entry} for index in range(tensors)]
        options["policy"] = actoffload.Plan.from_json(json.dumps({"version": 1, "entries": entries}))
    config = actoffload.OffloadConfig(
        target="nvme", engine="memory", path=path, devices="cpu", pending_bytes=PLENTY, host_budget=PLENTY, **options
    )
    return actoffload.Offloader(config)


class Clock:
    """Adds up the wall-clock time and the processor time of this thread between `start` and `stop`."""

    def __init__(self) -> None:
        self.wall_s = self.thread_s = 0.0
        self._begun = (0.0, 0.0)

    def start(self) -> None:
        """Count from here."""
        self._begun = (time.perf_counter(), time.thread_time())

    def stop(self) -> None:
        """Count to here."""
        self.wall_s += time.perf_counter() - self._begun[0]
        self.thread_s += time.thread_time() - self._begun[1]


def once(forward: Forward, context: Any, settle: Callable[[], None], chains: int) -> dict[str, float]:
    """Seconds of forward and backward, ``chains`` times; what settles in between is not counted."""
    clock = Clock()
    gc.collect()
    for _ in range(chains):
        clock.start()
        with context:
            out = forward()
        clock.stop()
        settle()
        direction = torch.ones_like(out)
        clock.start()
        out.backward(direction)
        del out
        clock.stop()
    return {"wall_s": clock.wall_s, "thread_s": clock.thread_s}


def empty_call_s() -> float:
    """Processor seconds of a call of a function that does nothing: how fast this machine is at the moment."""

    def nothing() -> None:
        pass

    since_s = time.thread_time()
    for _ in range(CALLS):
        nothing()
    return (time.thread_time() - since_s) / CALLS


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """All pairs of one sample, after one of each that is not counted."""
    torch.set_num_threads(1)
    kind, tensors, chains = spec["kind"], spec["tensors"], spec["chains"]
    forward = make_forward(kind, tensors, spec.get("nbytes") or 0)
    offloader = make_offloader(kind, tensors, spec.get("path") or tempfile.gettempdir())
    bare = _Bare()
    pairs = []
    for _ in range(spec["pairs"] + 1):
        pairs.append(
            {
                "bare": once(forward, bare, lambda: None, chains),
                "ours": once(forward, offloader, offloader.synchronize, chains),
                "empty_call_s": empty_call_s(),
            }
        )
    offloader.synchronize()
    statistics = offloader.statistics()
    offloader.close()
    saved = tensors * chains * len(pairs)
    moved = statistics.nvme_read_bytes > 0
    reasons = {REASONS[kind]} - {None}
    if statistics.packed_tensors != saved or moved == bool(reasons) or set(statistics.kept_bytes) != reasons:
        return {"error": f"not what was to be measured: {statistics.as_dict()}"}
    return {"tensors": tensors * chains, "pairs": pairs[1:], "statistics": statistics.as_dict()}


class _Bare:
    """Hooks that do nothing: what PyTorch itself pays for hooks."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        self._hooks.append(saved_tensors_hooks(lambda t: t, lambda t: t))
        self._hooks[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.pop().__exit__(*error)


def main(argument: str) -> int:
    print(json.dumps(measure(json.loads(argument))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
