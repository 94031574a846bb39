"""The modes that every benchmark knows by name: keep, recompute, the library's targets, and peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import actoffload
from actoffload.testing.faults import SlowEngine
from benchmarks.peers import Peer, SaveOnCpu, TorchSave, Trl
from benchmarks.workloads import Workload

_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_PRODUCTS = ("mm", "addmm", "bmm", *(f"_scaled_dot_product_{kind}" for kind in _ATTENTION))
PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in _PRODUCTS)
"""What selective checkpointing saves: matrix products and attention."""
WARM_UP = 4
"""Untimed steps of the library's modes: what a planner takes to see two steps, decide and settle."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a forward is run.

    Attributes:
        peer: whose hooks; "" for none, ``"actoffload"`` for the library, ``"attached"`` for its `attach`.
        recompute: every block under ``torch.utils.checkpoint``.
        saved: then what a selective checkpoint saves of it.
        options: for `offload_activations`. A ``device_budget`` from 0 to 1 is a share of what saved tensors take when
            all are kept; the name of a mode stands for that mode's peak. So it does as ``device_memory``.
    """

    peer: str = ""
    recompute: bool = False
    saved: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether it is the library."""
        return self.peer in ("actoffload", "attached")


def _ours(*, checkpointed: bool = False, **options: Any) -> Mode:
    return Mode(peer="actoffload", recompute=checkpointed, options=options)


class KeepAll:
    """A policy under which nothing moves."""

    def decide(self, facts: actoffload.TensorFacts) -> actoffload.Decision:
        """Keep it."""
        return actoffload.Decision.KEEP


MODES = {
    "keep": Mode(),
    "keep, same memory": _ours(policy=KeepAll()),  # tensors come from the library's allocator, but nothing moves
    "recompute": Mode(recompute=True),
    "selective": Mode(recompute=True, saved=PRODUCTS),
    "host": _ours(target="host"),
    "nvme": _ours(target="nvme"),
    "tiered": _ours(target="tiered"),
    "default": _ours(),
    "all": _ours(policy="all"),
    "host, all": _ours(target="host", policy="all"),
    "nvme, all": _ours(target="nvme", policy="all"),
    "budget 35 %": _ours(device_budget=0.35, recompute=True),
    "budget 35 %, exact": _ours(device_budget=0.35, recompute=True, codec="exact"),
    "recompute's peak": _ours(device_budget="recompute", recompute=True),
    "checkpointed, ours at equal memory": _ours(checkpointed=True, device_memory="recompute"),
    "checkpointed, no codec": _ours(checkpointed=True, device_memory="recompute", codec="none"),
    "recompute + host": _ours(checkpointed=True, target="host"),
    "recompute + nvme": _ours(checkpointed=True, target="nvme"),
    "attached": Mode(peer="attached", options={"target": "nvme"}),
    "attached, kept": Mode(peer="attached", options={"target": "nvme", "policy": KeepAll()}),  # counts, moves nothing
    "save_on_cpu": Mode(peer="save_on_cpu"),
    "torch.save": Mode(peer="torch.save"),
    "TRL": Mode(peer="trl"),
}


class Library(Peer):
    """The library, opened like one of its peers."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        self.options = {"model": model, **options}
        self.offloader: actoffload.Offloader | None = None

    def context(self) -> AbstractContextManager[Any]:
        manager = actoffload.offload_activations(**self.options)
        self.offloader = manager.offloader
        return manager

    def facts(self) -> dict[str, Any]:
        if self.offloader is None:
            return {}
        counts = self.offloader.statistics()
        read_bytes = max(counts.host_read_bytes, counts.nvme_read_bytes)
        return {"written_bytes": counts.moved_bytes, "read_bytes": read_bytes, "wait_s": counts.wait_s}

    def close(self) -> None:
        if self.offloader is not None:
            self.offloader.close()


class Attached(Library):
    """The library by its one line for any training loop: ``attach(model, target="nvme")`` and nothing else.

    ``disk_bytes_per_s`` among the options slows the disk down to that.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__(model, options)
        if "disk_bytes_per_s" in options:
            rate = self.options.pop("disk_bytes_per_s")
            self.options["engine"] = partial(SlowEngine, bandwidth_bytes_per_s=rate)
        self._attachment = actoffload.attach(self.options.pop("model"), **self.options)
        self.offloader = self._attachment.offloader

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        self._attachment.detach()
        super().close()


def open_peer(mode: Mode, work: Workload, device: torch.device, path: str | None, options: Mapping[str, Any]) -> Peer:
    """Whoever runs the forward of a mode; ``options`` go to the library, beside the mode's own.

    Raises:
        Unavailable: a peer cannot run here.
    """
    ours = {"path": path, **mode.options, **options}
    makers: dict[str, Callable[[], Peer]] = {
        "": Peer,
        "actoffload": lambda: Library(work.model, ours),
        "attached": lambda: Attached(work.model, ours),
        "save_on_cpu": lambda: SaveOnCpu(device),
        "torch.save": lambda: TorchSave(path),
        "trl": lambda: Trl(work.model, device),
    }
    return makers[mode.peer]()
