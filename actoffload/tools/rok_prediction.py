"""A case of the recompute-offload-keep curve, predicted from shapes: nothing is run and no memory is needed.

The step runs on meta tensors, which have shapes and no values. What autograd saves, when backward needs it and when it
is free again is noted on a clock that goes by FLOPs, at the rate that `estimate` takes for the GPU. That gives the
profile of a step in which every block is checkpointed and runs again, and the planner's simulator says what each
variant would do with it: ``recompute`` runs no block once, ``keep`` and ``offload`` run all once, ``hybrid`` mixes the
three as is best for its budget. Bytes go between the GPU and its SSDs directly, as in SSDTrain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ActOffloadError
from ..planning.profile import Link, Profile, Region, Storage
from ..planning.regions import choosable, run_again, with_regions
from ..planning.search import Limits, best
from ..planning.simulator import Conditions, Prediction, run, simulate
from ..planning.workload import KEEP, NVME, Choice, Workload
from ..policy import KeepReason
from . import models
from .estimate import hardware_of
from .estimates import Hardware
from .rok_points import BACKWARD_FACTOR, SERIES, Case, Variant
from .rok_worker import FAILURES, NO_BLOCKS, OFFLOAD_READS_AHEAD, failure
from .saved_bytes import MIN_BYTES, WatchedStep

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
        base, flops = profile_of(built, case.batch, hardware)
        plain = with_regions(base, choosable(base))
    except FAILURES as error:
        return failure(error)
    peaks: dict[str, int] = {}
    samples = []
    for variant in (Variant(**one) for one in spec["variants"]):
        sample: dict[str, Any] = {"series": variant.series, "level": variant.level, "flops": flops}
        try:
            budget = _budget(variant.level, plain.baseline_peak_bytes, peaks)
            found = _predict_variant(base, plain, variant.series, budget)
        except ActOffloadError as error:
            samples.append(sample | failure(error))
            continue
        peaks[variant.series] = found.peak_bytes
        ratio = found.step_s / plain.step_s
        sample |= {"step_s": [found.step_s], "peak_bytes": [found.peak_bytes], "ratios": [ratio]}
        samples.append(sample | {"device_budget": budget, "process_peak_bytes": None, "identical": None})
    return {"samples": samples}


def _budget(level: str, whole: int, peaks: Mapping[str, int]) -> int | None:
    if level in SERIES:
        if level not in peaks:
            raise ActOffloadError(f"no budget: the peak for {level} is not known")
        return peaks[level]
    return int(float(level) * whole) if level else None


def _predict_variant(base: Profile, plain: Profile, series: str, budget: int | None) -> Prediction:
    if series == "hybrid":
        # Without a budget, what lowers the peak of a step that recomputes nothing at no cost.
        step = base if budget is not None else plain
        limits = Limits(device_budget=budget, tiers=("nvme",))
        step, plan = best(step, limits)
        return simulate(step, plan, limits, detail=False)
    if series == "recompute" and not choosable(base):
        raise ActOffloadError(NO_BLOCKS)
    workload = Workload(base if series == "recompute" else plain)
    tiers = tuple(NVME if series == "offload" and item.movable else KEEP for item in workload.items)
    return run(workload, Choice(tiers), Conditions(), window=OFFLOAD_READS_AHEAD)


def profile_of(built: models.Workload, batch: int, hardware: Hardware) -> tuple[Profile, int]:
    """Run forward and backward of so many samples on meta tensors.

    Return the step in which every block is checkpointed and runs again, and the FLOPs of its model.
    """
    model, inputs = built.model, built.batch(batch)
    step = WatchedStep(model, {name: model.get_submodule(name) for name in built.blocks}, inputs)
    with models.unpacked_sequences(), step.flops:
        with step.forward():
            loss = built.loss(inputs)
        forward = step.now()
        torch.autograd.backward(loss)
    end, rate = step.now(), hardware.peak_flops * hardware.utilisation
    saved, sources = list(step.saved.values()), _sources(step)
    storages = [
        Storage(
            index=number,
            nbytes=one.nbytes,
            birth_s=one.birth / rate,
            need_s=None if one.need is None else one.need / rate,
            last_need_s=(end if one.last_need is None else one.last_need) / rate,
            module=None if one.block is None else step.blocks[one.block].name,
            kept="" if one.nbytes >= MIN_BYTES else KeepReason.SMALL.value,
            region=None if one.shared or number in sources.values() else one.block,
        )
        for number, one in enumerate(saved)
    ]
    for place, block in enumerate(step.blocks):
        if place not in sources:
            sources[place] = len(storages)
            last_s = max((s.last_need_s for s in storages if s.region == place), default=block.end / rate)
            storages.append(
                Storage(
                    index=len(storages),
                    nbytes=block.input_bytes,
                    birth_s=block.begin / rate,
                    need_s=None,
                    last_need_s=last_s,
                    module=block.name,
                )
            )
    regions = [
        Region(place=place, name=block.name, begin_s=block.begin / rate, end_s=block.end / rate)
        for place, block in enumerate(step.blocks)
    ]
    plain = Profile(
        storages=tuple(storages),
        regions=tuple(regions),
        disk=Link(write_bytes_per_s=hardware.write_bytes_per_s, read_bytes_per_s=hardware.read_bytes_per_s),
        forward_s=forward / rate,
        backward_s=(end - forward) / rate,
        device=hardware.name,
    )
    return run_again(plain, sources), BACKWARD_FACTOR * forward


def _sources(step: WatchedStep) -> dict[int, int]:
    """By block, the storage that a checkpoint of it saves as its input, if a plain run saves that, too."""
    numbers: dict[int | None, int] = {key: number for number, key in enumerate(step.saved)}
    saved = list(step.saved.values())
    found: dict[int, int] = {}
    for place, block in enumerate(step.blocks):
        source = numbers.get(block.source)
        if source is not None and (saved[source].shared or saved[source].block in (None, place)):
            found[place] = source
    return found
