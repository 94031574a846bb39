"""A case of the recompute-offload-keep curve, predicted from shapes: nothing is run and no memory is needed.

The step runs on meta tensors, which have shapes and no values. What autograd saves, when backward needs it and when it
is free again is noted on a clock that goes by FLOPs, at the rate that `estimate` takes for the GPU. That gives the
profile of a step, and the planner's simulator says what each variant would do with it. Bytes go between the GPU and
its SSDs directly, as in SSDTrain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..analysis.estimate import Hardware
from ..analysis.rok import BACKWARD_FACTOR, SERIES, Case, Variant
from ..analysis.saved_bytes import FLOPS, MIN_BYTES, AsOnAccelerator
from ..errors import ActOffloadError
from ..planning.planners import Limits, make_planner
from ..planning.profile import Block, Link, Profile, Storage
from ..planning.simulator import Conditions, Prediction, run
from ..planning.workload import KEEP, NVME, Choice, Workload
from ..policy import KeepReason
from . import models
from .estimate import hardware_of
from .rok_worker import FAILURES, NO_BLOCKS, OFFLOAD_READS_AHEAD, failure

DRIVES = {"drive": "980pro-1tb", "drives": 4}
"""The SSDs of a GPU, as `estimate` takes them."""


def describe_gpu(name: str) -> str:
    """Return a GPU and its SSDs in a line.

    Raises:
        ConfigError: `estimate` has no such GPU.
    """
    gpu = hardware_of({"gpu": name, **DRIVES})
    rates = f"{gpu.write_bytes_per_s / 1e9:.0f} GB/s out, {gpu.read_bytes_per_s / 1e9:.0f} back"
    return f"{name}, {gpu.peak_flops * gpu.utilisation / 1e12:.0f} TFLOP/s; {gpu.drives} SSDs, {rates}"


def predict(spec: dict[str, Any]) -> dict[str, Any]:
    """Return ``samples``, one for each variant, as a round that is measured gives them; ``gpu`` names the GPU.

    What cannot be predicted is a result as well.
    """
    case = Case(**spec["case"])
    try:
        step = _PaperStep(models.build(case, torch.device("meta")), hardware_of({"gpu": spec["gpu"], **DRIVES}))
        step.run(case.batch)
        workload = Workload(step.profile())
    except FAILURES as error:
        return failure(error)
    peaks: dict[str, int] = {}
    samples = []
    for variant in (Variant(**one) for one in spec["variants"]):
        sample: dict[str, Any] = {"series": variant.series, "level": variant.level, "flops": step.model_flops}
        try:
            budget = _budget(variant.level, workload.profile.baseline_peak_bytes, peaks)
            found = _predict_variant(workload, variant.series, budget)
        except ActOffloadError as error:
            samples.append(sample | failure(error))
            continue
        peaks[variant.series] = found.peak_bytes
        ratio = found.step_s / workload.profile.step_s
        sample |= {"step_s": [found.step_s], "peak_bytes": [found.peak_bytes], "ratios": [ratio]}
        samples.append(sample | {"device_budget": budget, "process_peak_bytes": None, "identical": None})
    return {"samples": samples}


def _budget(level: str, whole: int, peaks: Mapping[str, int]) -> int | None:
    if level in SERIES:
        if level not in peaks:
            raise ActOffloadError(f"no budget: the peak for {level} is not known")
        return peaks[level]
    return int(float(level) * whole) if level else None


def _predict_variant(workload: Workload, series: str, budget: int | None) -> Prediction:
    if series == "hybrid":
        limits = Limits(device_budget=budget, tiers=("nvme",))
        plan = make_planner("auto").plan(workload.profile, limits)
        conditions = Conditions(device_budget=budget)
        return run(workload, workload.from_plan(plan), conditions, window=plan.prefetch_bytes)
    if series == "recompute" and not workload.groups:
        raise ActOffloadError(NO_BLOCKS)
    tiers = tuple(NVME if series == "offload" and item.movable else KEEP for item in workload.items)
    recomputed = frozenset(range(len(workload.groups))) if series == "recompute" else frozenset()
    return run(workload, Choice(tiers, recomputed), Conditions(), window=OFFLOAD_READS_AHEAD)


@dataclass
class _Saved:
    """A saved storage so far; seconds."""

    nbytes: int
    birth_s: float
    block: int | None
    need_s: float | None = None
    last_need_s: float | None = None


class _PaperStep:
    """One step of a model on the meta device, and what it gave."""

    def __init__(self, workload: models.Workload, hardware: Hardware) -> None:
        self._workload = workload
        self._hardware = hardware
        self._flops = FlopCounterMode(display=False, custom_mapping=FLOPS)
        self._saved: dict[int, _Saved] = {}
        self._held: list[torch.UntypedStorage] = []  # so that no storage is taken for another
        self._static: set[int] = set()
        self._blocks: list[dict[str, Any]] = []
        self._running: int | None = None
        self.model_flops = 0
        self._forward_s = self._end_s = 0.0

    def run(self, batch: int) -> None:
        """Run forward and backward of so many samples."""
        inputs = self._workload.batch(batch)
        model = self._workload.model
        self._static = {
            tensor.untyped_storage()._cdata
            for tensor in (*model.parameters(), *model.buffers(), *tree_leaves(inputs))
            if isinstance(tensor, Tensor)
        }
        with models.unpacked_sequences(), self._flops, self._watched(model):
            with AsOnAccelerator(), saved_tensors_hooks(self._pack, self._unpack):
                loss = self._workload.loss(inputs)
            self.model_flops = BACKWARD_FACTOR * int(self._flops.get_total_flops())
            self._forward_s = self._now()
            torch.autograd.backward(loss)
            self._end_s = self._now()

    def profile(self) -> Profile:
        """Return the step as a profile."""
        numbers = {key: number for number, key in enumerate(self._saved)}
        storages = tuple(
            Storage(
                index=number,
                nbytes=one.nbytes,
                birth_s=one.birth_s,
                need_s=one.need_s,
                last_need_s=self._end_s if one.last_need_s is None else one.last_need_s,
                block=one.block,
                kept="" if one.nbytes >= MIN_BYTES else KeepReason.SMALL.value,
            )
            for number, one in enumerate(self._saved.values())
        )
        blocks = []
        for number, block in enumerate(self._blocks):
            needs = [s.need_s for s in storages if s.block == number and s.need_s is not None]
            ends = [s.last_need_s for s in storages if s.block == number]
            source = numbers.get(block.pop("source"))
            mine = source is not None and storages[source].block in (None, number)
            backward_s = max(ends, default=0.0) - min(needs, default=0.0)
            blocks.append(Block(**block, backward_s=backward_s, input=source if mine else None))
        disk = Link(
            write_bytes_per_s=self._hardware.write_bytes_per_s, read_bytes_per_s=self._hardware.read_bytes_per_s
        )
        return Profile(
            storages=storages,
            blocks=tuple(blocks),
            disk=disk,
            forward_s=self._forward_s,
            backward_s=self._end_s - self._forward_s,
            device=self._hardware.name,
        )

    def _now(self) -> float:
        return self._flops.get_total_flops() / (self._hardware.peak_flops * self._hardware.utilisation)

    def _pack(self, tensor: Tensor) -> Tensor | _Handle:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._static:
            return tensor
        if key not in self._saved:
            self._held.append(storage)
            self._saved[key] = _Saved(storage.nbytes(), self._now(), self._running)
        elif self._saved[key].block != self._running:
            self._saved[key].block = None
        return _Handle(self, self._saved[key], tensor)

    def _unpack(self, packed: Tensor | _Handle) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.saved.need_s is None:
            packed.saved.need_s = self._now()
        return packed.tensor

    @contextmanager
    def _watched(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for name in self._workload.blocks:
            block = model.get_submodule(name)
            handles.append(block.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self._running = len(self._blocks)
            source = hidden.untyped_storage()._cdata
            begin = {"name": name, "forward_s": self._now(), "input_bytes": hidden.nbytes, "source": source}
            self._blocks.append(begin)

        return enter

    def _leave(self, *_: Any) -> None:
        block = self._blocks[-1]
        block["forward_s"] = block["recompute_s"] = self._now() - block["forward_s"]
        self._running = None


class _Handle:
    """What autograd holds of a saved tensor; when it lets go, backward is done with it."""

    def __init__(self, step: _PaperStep, saved: _Saved, tensor: Tensor) -> None:
        self.step, self.saved, self.tensor = step, saved, tensor

    def __del__(self) -> None:
        self.saved.last_need_s = self.step._now()
