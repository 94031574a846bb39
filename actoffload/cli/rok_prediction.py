"""A case of the recompute-offload-keep curve, predicted from shapes: nothing is run and no memory is needed.

The step runs on meta tensors, which have shapes and no values. What autograd saves, when backward needs it and when it
is free again is noted on a clock that goes by FLOPs, at the rate that `estimate` takes for the GPU. That gives the
profile of a step, and the planner's simulator says what each variant would do with it. Bytes go between the GPU and
its SSDs directly, as in SSDTrain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..analysis.estimate import Hardware
from ..analysis.rok import BACKWARD_FACTOR, SERIES, Case, Variant
from ..analysis.saved_bytes import MIN_BYTES, WatchedStep
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
        built, hardware = models.build(case, torch.device("meta")), hardware_of({"gpu": spec["gpu"], **DRIVES})
        profile, flops = profile_of(built, case.batch, hardware)
        workload = Workload(profile)
    except FAILURES as error:
        return failure(error)
    peaks: dict[str, int] = {}
    samples = []
    for variant in (Variant(**one) for one in spec["variants"]):
        sample: dict[str, Any] = {"series": variant.series, "level": variant.level, "flops": flops}
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


def profile_of(built: models.Workload, batch: int, hardware: Hardware) -> tuple[Profile, int]:
    """Run forward and backward of so many samples on meta tensors; return the step, and the FLOPs of its model."""
    model, inputs = built.model, built.batch(batch)
    step = WatchedStep(model, {name: model.get_submodule(name) for name in built.blocks}, inputs)
    with models.unpacked_sequences(), step.flops:
        with step.forward():
            loss = built.loss(inputs)
        forward = step.now()
        torch.autograd.backward(loss)
    end, rate = step.now(), hardware.peak_flops * hardware.utilisation
    storages = tuple(
        Storage(
            index=number,
            nbytes=one.nbytes,
            birth_s=one.birth / rate,
            need_s=None if one.need is None else one.need / rate,
            last_need_s=(end if one.last_need is None else one.last_need) / rate,
            block=None if one.shared else one.block,
            kept="" if one.nbytes >= MIN_BYTES else KeepReason.SMALL.value,
        )
        for number, one in enumerate(step.saved.values())
    )
    numbers: dict[int | None, int] = {key: number for number, key in enumerate(step.saved)}
    blocks = []
    for number, block in enumerate(step.blocks):
        needs = [s.need_s for s in storages if s.block == number and s.need_s is not None]
        ends = [s.last_need_s for s in storages if s.block == number]
        source = numbers.get(block.source)
        mine = source is not None and storages[source].block in (None, number)
        forward_s = (block.end - block.begin) / rate
        blocks.append(
            Block(
                name=block.name,
                forward_s=forward_s,
                backward_s=max(ends, default=0.0) - min(needs, default=0.0),
                recompute_s=forward_s,
                input_bytes=block.input_bytes,
                input=source if mine else None,
            )
        )
    profile = Profile(
        storages=storages,
        blocks=tuple(blocks),
        disk=Link(write_bytes_per_s=hardware.write_bytes_per_s, read_bytes_per_s=hardware.read_bytes_per_s),
        forward_s=forward / rate,
        backward_s=(end - forward) / rate,
        device=hardware.name,
    )
    return profile, BACKWARD_FACTOR * forward
