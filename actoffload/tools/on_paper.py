"""The needs of offloading, on paper: memory, bandwidth, the share that hides, an SSD's life.

The model is SSDTrain's (arXiv 2408.10013, its section on modelling): a step of ``t`` seconds that saves ``S`` bytes on
a GPU writes them in one half and reads them in the other, so it needs ``S / (t/2)`` each way; a drive lives
``endurance · t / S``, by its rated endurance. The presets are in ``presets.toml``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from ..errors import ConfigError
from ..sizes import parse_size
from ..storage.endurance import YEAR_S, format_duration, written_per_day
from .console import option

RESERVED_BYTES = 1 << 30
"""GPU memory besides tensors: the CUDA context and libraries' workspaces (a round figure, recalled)."""
LAYERS_IN_TRANSIT = 2
"""Layers on the device at once when all move: one is in use, one is being copied."""
SPLIT, MACHINE = "Split; default: the model preset's", "Machine, per GPU; default: the preset's"
T = TypeVar("T")


def _parsed(flag: str, unit: str, convert: Callable[[str], float], help: str) -> Any:
    """Return an option of the machine; ``convert`` makes a number of its text."""

    def parse(text: str) -> float:
        try:
            return convert(text)
        except ValueError as error:  # click would show the text alone
            raise typer.BadParameter(str(error).removeprefix(f"{flag[2:]}=")) from error

    return option(help, flag, metavar=unit, parser=parse, panel=MACHINE)


def _giga(text: str) -> float:
    return 1e9 * float(text)


def _check(owner: object, *names: str) -> None:
    """Refuse all values but numbers above 0 and None."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(name, value, "must be a number above 0")


@dataclass(frozen=True, kw_only=True)
class Drive:
    """One SSD as its maker rates it: TBW × 10¹² bytes; bytes a second in sequence, to write into an empty SLC cache."""

    name: str
    rated_written_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    nand: bool = True
    """Flash, which writes slower once its cache is full."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a step is split over GPUs. ``sequence_parallel``: norms and dropout, too (Korthikanti et al. 2022)."""

    tensor: Annotated[int, option(min=1, panel=SPLIT)] = 1
    sequence_parallel: Annotated[bool, option(panel=SPLIT)] = False
    data: Annotated[int, option(min=1, panel=SPLIT)] = 1
    zero: Annotated[int, option("Stage of ZeRO over --data ranks; FSDP is 3.", panel=SPLIT)] = 0

    def __post_init__(self) -> None:
        _check(self, "tensor", "data")
        if self.zero not in range(4):
            raise ConfigError("zero", self.zero, "is a stage, 0 to 3")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU's share of a machine. Rates in FLOP/s and bytes a second, one way."""

    name: str
    flops_per_s: Annotated[
        float, _parsed("--tflops", "TFLOP/S", lambda text: 1e12 * float(text), "That a whole step reaches.")
    ]
    link_bytes_per_s: Annotated[float, _parsed("--link", "GB/S", _giga, "To host memory and back, each.")]
    memory_bytes: Annotated[int, _parsed("--memory", "SIZE", partial(parse_size, "memory"), 'Of the GPU: "24GiB".')]
    drive: Drive
    target: Annotated[str, option("Where bytes go: nvme or host.", panel=MACHINE)] = "nvme"
    drives: Annotated[int, option("SSDs per GPU. Default: 4.", min=1, panel=MACHINE)] = 4
    disk_bytes_per_s: Annotated[
        float | None,
        _parsed("--disk", "GB/S", _giga, "Of all SSDs together, both ways, as `bench` measures it. Default: as rated."),
    ] = None
    source: str = ""

    def __post_init__(self) -> None:
        _check(self, "flops_per_s", "link_bytes_per_s", "memory_bytes", "drives", "disk_bytes_per_s")
        if self.target not in ("nvme", "host"):
            raise ConfigError("target", self.target, "choose one of 'nvme', 'host'")

    @property
    def write_bytes_per_s(self) -> float:
        """Away from the device: the link, or the drives if they are slower."""
        return self._through(self.drive.write_bytes_per_s)

    @property
    def read_bytes_per_s(self) -> float:
        """Back to the device, likewise."""
        return self._through(self.drive.read_bytes_per_s)

    def _through(self, rated: float) -> float:
        drives = self.disk_bytes_per_s or rated * self.drives
        return min(self.link_bytes_per_s, drives if self.target == "nvme" else math.inf)


# -- presets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A model, its micro-batch and split, and the GPU that it ran on or that suits it."""

    kind: str
    config: dict[str, Any]
    sequence: int
    micro_batch: int = 1
    split: Parallelism = field(default_factory=Parallelism)
    gpu: str = "h100-sxm"
    source: str = "transformers"


BUILT_IN = "gpt"
"""The kind of the built-in GPT; each other kind is a model type of Transformers."""
TABLES: dict[str, Any] = tomllib.loads(files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))
SOURCES: dict[str, str] = TABLES["source"]
GPUS: dict[str, dict[str, Any]] = TABLES["gpu"]
DRIVES = msgspec.convert(TABLES["drive"], dict[str, Drive])
MODELS = msgspec.convert(TABLES["model"], dict[str, ModelPreset])
PUBLISHED: list[dict[str, Any]] = [row | {"source": SOURCES[row["source"]]} for row in TABLES["published"]["rows"]]
"""GB that a step of a model preset saves, as published."""


def preset(option: str, name: str, known: Mapping[str, T]) -> T:
    """Return the preset of that name."""
    if name not in known:
        raise ConfigError(option, name, f"no such preset; there are {', '.join(known)}")
    return known[name]


def hardware_of(gpu: str, drive: str = "980pro-1tb", **changes: Any) -> Hardware:
    """Return the machine of a GPU preset and a drive preset, with some fields changed."""
    row: dict[str, Any] = {**preset("gpu", gpu, GPUS)}
    flops_per_s = row.pop("peak_flops") * row.pop("utilisation")
    source = SOURCES[row["source"]].partition("; the link" if "link_bytes_per_s" in changes else "\n")[0]
    fixed = {"name": gpu, "drive": preset("drive", drive, DRIVES), "flops_per_s": flops_per_s}
    return Hardware(**{**row, **fixed, "source": source, **changes})


# -- the estimate -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one micro-batch of a model on one GPU if it had all layers, and the whole model's FLOPs for it.

    Attributes:
        blocks: saved bytes of each layer, in tensors that are large enough to move.
        small_bytes: of all layers in other tensors, which stay.
        ends_bytes: of embedding, last norm and loss. Their backward follows at once, so they stay.
        flops: forward and backward; as they are counted, of a forward alone.
        source: how they were counted.
    """

    label: str = ""
    micro_batch: int = 1
    blocks: tuple[float, ...]
    small_bytes: float = 0.0
    ends_bytes: float = 0.0
    flops: float
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class Fit:
    """Saved bytes on a GPU at its peak, and samples of the largest micro-batch that fits so; 0 for none."""

    saved_bytes: float
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes on a GPU at its peak, without temporaries: with all kept, what hides moved, and all moved."""

    capacity_bytes: float
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    kept: Fit
    hidden: Fit
    moved: Fit

    @property
    def states_bytes(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


class Estimate:
    """The needs of offloading a model's activations, per GPU. Bytes, seconds, bytes a second.

    ``step_s``: seconds of a step as measured. Default: the step's FLOPs over the rate that the GPU achieves.

    Attributes:
        activation_bytes_per_step: S: layers save it in tensors that can move.
        required_bytes_per_s: S / (t/2), to write and, in the other half of the step, to read.
        share_hidden: the share of S that moves without making the step longer, at most 1; the rest is kept.
        rated_life_s: of all of the GPU's drives, on rated TBW.
        notes: for a reader to know before quoting a number.
    """

    def __init__(
        self, activations: Activations, split: Parallelism, hardware: Hardware, *, step_s: float | None = None
    ) -> None:
        self.step_flops = activations.flops / split.tensor
        self.step_s = self.step_flops / hardware.flops_per_s if step_s is None else step_s
        if not 0 < self.step_s < math.inf:
            raise ConfigError("step_s", step_s, "must be a number of seconds above 0")
        self.activation_bytes_per_step = sum(activations.blocks)
        self.required_bytes_per_s = self.activation_bytes_per_step / (self.step_s / 2)
        self.write_bytes_per_s, self.read_bytes_per_s = hardware.write_bytes_per_s, hardware.read_bytes_per_s
        slower = min(self.write_bytes_per_s, self.read_bytes_per_s)
        self.share_hidden = min(1.0, slower / max(1.0, self.required_bytes_per_s))
        self.moved_bytes_per_step = self.share_hidden * self.activation_bytes_per_step
        written = self.moved_bytes_per_step if hardware.target == "nvme" else 0.0
        self.written_bytes_per_day = written_per_day(written, self.step_s)
        rated = hardware.drive.rated_written_bytes * hardware.drives
        self.rated_life_s = rated * self.step_s / written if written else math.inf
        self.memory = _memory_of(activations, split, hardware, self.share_hidden)
        self.notes = _notes(activations, hardware, self.share_hidden, self.rated_life_s)

    def as_dict(self) -> dict[str, object]:
        """Return every attribute, ready for JSON (an endless life is None there)."""
        found = {name: None if value == math.inf else value for name, value in vars(self).items()}
        return found | {"memory": asdict(self.memory)}


def _memory_of(activations: Activations, split: Parallelism, hardware: Hardware, share: float) -> MemoryNeed:
    states = {}
    # Each stage of ZeRO also splits everything that the stages before it split.
    for stage, name in ((3, "parameter_bytes"), (2, "gradient_bytes"), (1, "optimizer_bytes")):
        states[name] = getattr(activations, name) / (split.data if split.zero >= stage else 1)
    capacity = hardware.memory_bytes - RESERVED_BYTES
    free = max(0.0, capacity - sum(states.values()))
    movable, rest = sum(activations.blocks), activations.small_bytes + activations.ends_bytes

    def peak(moves: float) -> Fit:
        in_transit = min(moves * movable, LAYERS_IN_TRANSIT * max(activations.blocks))
        saved = rest + (1 - moves) * movable + in_transit
        return Fit(saved, int(free * activations.micro_batch / max(1.0, saved)))

    return MemoryNeed(capacity_bytes=capacity, **states, kept=peak(0.0), hidden=peak(share), moved=peak(1.0))


def _notes(activations: Activations, hardware: Hardware, share: float, life_s: float) -> list[str]:
    notes = []
    if life_s < YEAR_S:
        life = format_duration(life_s)
        notes.append(f"WEAR: the drives reach their rated writes in {life} of training: try --target host first.")
    if share < 1.0:
        notes.append(f"{share:.0%} hides; moving more would make the step longer, so the rest is kept.")
    if hardware.target == "nvme" and hardware.drive.nand and hardware.disk_bytes_per_s is None:
        notes.append("The drives' rated write rate is for a fresh cache; a measured, sustained one may be much lower.")
    if activations.source:
        notes.append(f"Bytes by {activations.source}.")
    sources = (hardware.source, *([hardware.drive.source] if hardware.target == "nvme" else []))
    return notes + [f"Check before quoting: {source}." for source in sources if "recalled" in source]
