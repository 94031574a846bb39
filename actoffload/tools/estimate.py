"""``actoffload estimate``: the needs of offloading a model, on paper: memory, links, drives.

The planner predicts a step from shapes, as for `try` and for the curves of `rok`. A drive's life is SSDTrain's (arXiv
2408.10013, its section on modelling): its rated endurance over the bytes that a step writes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape

from ..errors import ActOffloadError, BudgetError, ConfigError
from ..planning.profile import Profile
from ..planning.regions import choosable
from ..planning.search import Limits, best
from ..planning.simulator import Conditions, Prediction, run, simulate
from ..planning.workload import KEEP, NVME, Workload
from ..sizes import format_size
from ..storage.endurance import YEAR_S, format_decimal, format_duration, written_per_day
from .console import JsonOption, grouped, option, print_json, print_rows
from .on_paper import (
    DRIVES,
    GPUS,
    MODELS,
    RESERVED_BYTES,
    SOURCES,
    SPLIT,
    Hardware,
    ModelPreset,
    Parallelism,
    hardware_of,
    is_own,
    preset,
)

if TYPE_CHECKING:
    from torch import nn

    from .models import Trainee

COUNTED: dict[str, Any] = {"sequence": 2048, "gpu": "rtx-4090"}
"""The preset for ``--from-model``."""
NO_BLOCKS = "there are no blocks to recompute: layers of one class in a ModuleList or Sequential"
OFFLOAD_READS_AHEAD = 1 << 20
"""Bytes that the series ``offload`` reads ahead; the library makes that twice the largest tensor (SSDTrain reads one
module ahead). Its default, a quarter of the bytes that a forward saves, is a whole block of four: recompute's peak."""
ZERO = {"parameters": 3, "gradients": 2, "optimizer": 1}
"""The stages of ZeRO from which on the states of a model are split."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The user's model and machine; None for the preset's."""

    model: Annotated[str, option("Preset to start from; --presets lists them.")] = "llama3-8b"
    from_model: Annotated[str | None, option("Or FILE.py:FUNCTION, a config.json, or a type of Transformers.")] = None
    gpu: Annotated[str | None, option("Preset of the GPU. Default: the model's.")] = None
    drive: Annotated[str, option("Preset of the SSD.")] = "980pro-1tb"
    sequence: Annotated[int | None, option(min=1, panel=SPLIT)] = None
    micro_batch: Annotated[int, option(min=1, panel=SPLIT)] = 1
    adapters: Annotated[int | None, option("Rank of LoRA beside each linear layer; the rest is frozen.", min=1)] = None
    optimizer_bytes: Annotated[
        float | None, option("Per trained parameter. Default: AdamW's 12, 8 in float32.", min=0, panel=SPLIT)
    ] = None

    @property
    def start(self) -> ModelPreset:
        """The preset, whose values hold for every option that the user leaves out."""
        if self.from_model is not None:
            return ModelPreset(kind="", config={}, **COUNTED)
        return preset("model", self.model, MODELS)


@grouped
def command(
    question: Question,
    split: Annotated[dict[str, Any], Parallelism],
    machine: Annotated[dict[str, Any], Hardware],
    presets: Annotated[bool, option("List the presets and leave.", "--presets")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say on paper what offloading needs: memory, bandwidth, the share that hides, the SSDs' life on rated TBW.

    FUNCTION returns a model and make_batch(size), which returns the model's arguments for that many samples.
    """
    if presets:
        rows = list_presets()
        if as_json:
            print_json(rows)
        else:
            print_rows([list(row.values()) for row in rows], *rows[0])
        return
    found = Estimate(question, split, machine)
    if as_json:
        print_json(found.as_dict())
    else:
        show(f"{question.from_model or question.model} on {found.hardware.name}", found)


@dataclass(frozen=True)
class Fit:
    """Saved bytes on a GPU at its peak, the step, and samples of the largest micro-batch that fits so; 0 for none."""

    saved_bytes: int
    step_s: float
    micro_batch: int


class Estimate:
    """The needs of offloading a model's activations, per GPU. Bytes, seconds, bytes a second.

    Attributes:
        activation_bytes_per_step: S, in tensors that can move: ``layers_bytes`` of each layer, and ``ends_bytes``.
        small_bytes: in tensors that are too small to move.
        required_bytes_per_s: S / (t/2), to write and, in the other half of the step, to read.
        states: bytes of parameters, gradients and optimizer states.
        fits: ``kept``: with all kept; ``hidden``: moving lowers the peak as far as no step is longer; ``least``: the
            lowest peak of all plans.
        moved_bytes_per_step: of the plan ``hidden``, as a share of S in ``share_hidden``.
        rated_life_s: of all of the GPU's drives, on rated TBW.
        notes: for a reader to know before quoting a number.
    """

    def __init__(self, question: Question, split: dict[str, Any], machine: dict[str, Any]) -> None:
        start = question.start
        self.split = replace(start.split, **split)
        self.hardware = hardware_of(question.gpu or start.gpu, question.drive, **machine)
        micro_batch, ranks = question.micro_batch, self.split.tensor
        workload, label = build_on_paper(question)
        if not workload.blocks:
            remedy = "no layers found: some of one class must be in a ModuleList"
            raise ConfigError("from_model", question.from_model, remedy)
        from .models import profiles_of

        _, step, watched = profiles_of(workload, micro_batch, self.hardware, ranks)
        layers = dict.fromkeys(workload.blocks, 0)
        for storage in step.storages:
            if storage.movable and storage.module is not None:
                layers[storage.module] += storage.nbytes
        runs = [(len(list(run)), size) for size, run in groupby(map(format_size, layers.values()))]
        kinds = ", ".join(f"{number} × {size}" for number, size in runs[:4]) + (", …" if len(runs) > 4 else "")
        self.label = f"{label}, micro-batch {micro_batch}: {kinds}"
        self.step_s, self.step_flops = step.step_s, watched.now() / ranks
        self.activation_bytes_per_step = step.movable_bytes
        self.layers_bytes = list(layers.values())
        self.ends_bytes = step.movable_bytes - sum(self.layers_bytes)
        self.small_bytes = step.saved_bytes - step.movable_bytes
        self.required_bytes_per_s = self.activation_bytes_per_step / (self.step_s / 2)
        # Each stage of ZeRO also splits everything that the stages before it split.
        shares = {name: self.split.data if self.split.zero >= stage else 1 for name, stage in ZERO.items()}
        states = states_of(workload.model, question)
        self.states = {name: nbytes / ranks / shares[name] for name, nbytes in states.items()}
        self.fits, self.moved_bytes_per_step = self._plans(step, micro_batch)
        self.share_hidden = self.moved_bytes_per_step / (self.activation_bytes_per_step or 1)
        written = self.moved_bytes_per_step if self.hardware.target == "nvme" else 0
        self.written_bytes_per_day = written_per_day(written, self.step_s)
        rated = self.hardware.drive.rated_written_bytes * self.hardware.drives
        self.rated_life_s = rated * self.step_s / written if written else math.inf
        attention = "flash attention" if watched.kernels.attentions else "its own attention, whose matrices are kept"
        self.notes = self._notes(f"Bytes by counting on meta tensors, with {attention}.")

    def _plans(self, step: Profile, micro_batch: int) -> tuple[dict[str, Fit], int]:
        free, floor = self.hardware.tensor_bytes - sum(self.states.values()), None
        try:
            predict_variant(step, step, "hybrid", 1)
        except BudgetError as error:
            floor = error.floor_bytes
        kept, hidden = (predict_variant(step, step, series, None) for series in ("keep", "hybrid"))
        least = predict_variant(step, step, "hybrid", floor)
        fits = {}
        for name, seen in {"kept": kept, "hidden": hidden, "least": least}.items():
            samples = int(max(0.0, free) * micro_batch / max(1, seen.peak_bytes))
            fits[name] = Fit(seen.peak_bytes, seen.step_s, samples)
        return fits, hidden.disk.written_bytes

    def _notes(self, counted: str) -> list[str]:
        notes, hardware = [counted], self.hardware
        if self.rated_life_s < YEAR_S:
            life = format_duration(self.rated_life_s)
            text = f"WEAR: the drives reach their rated writes in {life} of training: try --target host first."
            notes.insert(0, text)
        if hardware.target == "nvme" and hardware.drive.nand and hardware.disk_bytes_per_s is None:
            text = "The drives' rated write rate is for a fresh cache; a measured, sustained one may be much lower."
            notes.append(text)
        sources = (hardware.source, *([hardware.drive.source] if hardware.target == "nvme" else []))
        return notes + [f"Check before quoting: {source}." for source in sources if "recalled" in source]

    def as_dict(self) -> dict[str, Any]:
        """Return every attribute, ready for JSON (an endless life is None there)."""
        found = vars(self) | {name: asdict(getattr(self, name)) for name in ("split", "hardware")}
        found["fits"] = {name: asdict(fit) for name, fit in self.fits.items()}
        return {name: None if value == math.inf else value for name, value in found.items()}


def build_on_paper(question: Question) -> tuple[Trainee, str]:
    """Return the model on meta tensors, adapters included, and its name."""
    import torch

    from .models import adapt, build_own, build_transformers, configuration

    start, source, meta = question.start, question.from_model, torch.device("meta")
    sequence = question.sequence or start.sequence
    if source is not None and is_own(source):
        if question.sequence is not None:
            raise ConfigError("sequence", sequence, "your own make_batch(size) says it; leave it out")
        workload, label = build_own("from_model", source, meta), source
    else:
        config = configuration(source or start.kind, **start.config)
        workload = build_transformers(config, sequence=sequence, dtype=torch.bfloat16, device=meta)
        label = f"{config.model_type}, sequence {sequence}"
    if question.adapters is not None:
        adapt(workload, question.adapters)
        label += f", adapters of rank {question.adapters}"
    return workload, label


def states_of(model: nn.Module, question: Question) -> dict[str, float]:
    """Return the bytes of parameters, gradients and optimizer states.

    By default the optimizer is AdamW: two moments in float32, and a float32 copy of narrower parameters.
    """
    given = question.optimizer_bytes
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    default = sum(parameter.numel() * (8 if parameter.itemsize >= 4 else 12) for parameter in trained)
    elements = sum(parameter.numel() for parameter in trained)
    return {
        "parameters": sum(parameter.nbytes for parameter in model.parameters()),
        "gradients": sum(parameter.nbytes for parameter in trained),
        "optimizer": default if given is None else given * elements,
    }


# -- a step, predicted ------------------------------------------------------------------------------------------------


def predict_variant(base: Profile, plain: Profile, series: str, budget: int | None) -> Prediction:
    """Predict a series. ``base`` runs every block again, as ``recompute`` does; ``plain`` runs all once, as others do.

    The hybrid is the best mix for its ``budget``.
    """
    if series == "hybrid":
        # Without a budget: lower the peak of a step that recomputes nothing, as far as that costs no time.
        limits = Limits(device_budget=budget, tiers=("nvme",))
        step, plan = best(base if budget is not None else plain, limits)
        return simulate(step, plan, limits, detail=False)
    if series == "recompute" and not choosable(base):
        raise ActOffloadError(NO_BLOCKS)
    workload = Workload(base if series == "recompute" else plain)
    tiers = tuple(NVME if series == "offload" and item.movable else KEEP for item in workload.items)
    return run(workload, tiers, Conditions(), window=OFFLOAD_READS_AHEAD)


# -- as text ----------------------------------------------------------------------------------------------------------


def show(name: str, found: Estimate) -> None:
    """Print what to do, the activations, the memory, the bandwidth, the SSDs, and notes for a reader."""
    split, hardware = found.split, found.hardware
    warnings = [note for note in found.notes if note.startswith("WEAR")]
    for line in (advice(found), *warnings):
        Console().print(escape(line), style="bold")
    small = f", and {format_size(found.small_bytes)} in tensors too small to move" if found.small_bytes else ""
    activations = [
        ("model", found.label),
        ("split", f"tensor {split.tensor}, data {split.data}, ZeRO {split.zero}"),
        ("activations of a step", f"{format_size(found.activation_bytes_per_step)} (S){small}"),
        ("outside of layers", f"{format_size(found.ends_bytes)} of them: embedding, last norm and loss"),
        ("step time", f"{found.step_s:.3g} s ({found.step_flops / found.step_s / 1e12:.0f} TFLOP/s)"),
    ]
    print_rows(activations, title=f"{name}, per GPU of {split.tensor * split.data}")
    states_bytes = sum(found.states.values())
    states = ", ".join(f"{format_size(nbytes)} {name}" for name, nbytes in found.states.items())
    memory = [
        ("there is", f"{format_size(hardware.tensor_bytes)} for tensors"),
        ("model states", f"{format_size(states_bytes)}: {states}"),
    ]
    for label, fit in zip(("all kept", "what hides moves", "the least"), found.fits.values(), strict=True):
        needed = states_bytes + fit.saved_bytes
        fits = "fits" if needed <= hardware.tensor_bytes else "does NOT fit"
        memory.append((label, f"{format_size(needed)}, {format_size(fit.saved_bytes)} of it saved: {fits}"))
        text = f"a step of {fit.step_s:.3g} s; the largest micro-batch that fits: {fit.micro_batch or 'none'}"
        memory.append(("", text))
    print_rows(memory, title="memory of a GPU at its peak")
    rates = f"{hardware.write_bytes_per_s / 1e9:.1f} GB/s to write, {hardware.read_bytes_per_s / 1e9:.1f} to read"
    links = [
        ("needed, each way", f"{found.required_bytes_per_s / 1e9:.1f} GB/s (S / (t/2))"),
        ("there is", rates),
        ("share that hides", f"{found.share_hidden:.0%}, {format_size(found.moved_bytes_per_step)} a step"),
    ]
    if hardware.target == "nvme":
        rated = format_decimal(hardware.drive.rated_written_bytes * hardware.drives)
        links.append(("drives", f"{hardware.drives} × {hardware.drive.name}, rated {rated} written"))
        links.append(("written", f"{format_decimal(found.written_bytes_per_day)} a day"))
        links.append(("life on rated TBW", format_duration(found.rated_life_s)))
    print_rows(links, title="links and where bytes go")
    for note in (note for note in found.notes if note not in warnings):
        Console().print(f"- {escape(note)}")


def advice(found: Estimate) -> str:
    """Return what to do so that the model fits, as a sentence with options."""
    states_bytes = sum(found.states.values())
    free = found.hardware.tensor_bytes - states_bytes
    kept, hidden, least = found.fits.values()
    if kept.saved_bytes <= free:
        more = f"; with offloading up to {hidden.micro_batch}" if hidden.micro_batch > kept.micro_batch else ""
        return f"It fits as it is, up to micro-batch {kept.micro_batch}{more}."
    if hidden.saved_bytes <= free:
        return "It fits with offloading, and no step is longer."
    if least.saved_bytes <= free:
        return "It fits with offloading and device_budget=: more has to move than hides, so steps wait."
    ways = []
    if least.micro_batch:
        ways.append(f"--micro-batch {least.micro_batch}")
    elif free > 0:
        ways.append("a shorter --sequence, or gradient checkpointing")
    if found.states["gradients"] > 0.1 * found.states["parameters"]:
        ways.append("--adapters 16")
    if found.split.zero < 3:
        ways.append("--zero 3 --data N over N GPUs")
    needed = states_bytes + least.saved_bytes + RESERVED_BYTES
    ways += [f"--gpu {name}" for name, gpu in GPUS.items() if gpu["memory_bytes"] >= needed][:1]
    return f"It does NOT fit, whatever moves: {format_size(needed)} are needed. Try {'; or '.join(ways)}."


def list_presets() -> list[dict[str, Any]]:
    """Return the presets and their sources."""
    rows = [("--model", name, SOURCES["transformers"]) for name in MODELS]
    rows += [("--gpu", name, SOURCES[entry["source"]]) for name, entry in GPUS.items()]
    rows += [("--drive", name, entry.source) for name, entry in DRIVES.items()]
    return [{"option": option, "name": name, "source": source} for option, name, source in rows]
