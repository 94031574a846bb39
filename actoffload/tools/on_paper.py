"""The machines and models that commands name. The presets are in ``presets.toml``."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from ..errors import ConfigError
from ..sizes import parse_size
from .console import option

RESERVED_BYTES = 1 << 30
"""GPU memory besides tensors: the CUDA context and libraries' workspaces (a round figure, recalled)."""
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


def check_positive(owner: object, *names: str) -> None:
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
    """How a step is split over GPUs."""

    tensor: Annotated[int, option("Ranks of tensor with sequence parallelism.", min=1, panel=SPLIT)] = 1
    data: Annotated[int, option(min=1, panel=SPLIT)] = 1
    zero: Annotated[int, option("Stage of ZeRO over --data ranks; FSDP is 3.", panel=SPLIT)] = 0

    def __post_init__(self) -> None:
        check_positive(self, "tensor", "data")
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
        check_positive(self, "flops_per_s", "link_bytes_per_s", "memory_bytes", "drives", "disk_bytes_per_s")
        if self.target not in ("nvme", "host"):
            raise ConfigError("target", self.target, "choose one of 'nvme', 'host'")

    @property
    def tensor_bytes(self) -> int:
        """Memory for tensors."""
        return self.memory_bytes - RESERVED_BYTES

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


def is_own(source: str) -> bool:
    """Return whether this names a function in a user's file, rather than a preset or a configuration."""
    return ".py:" in source


@dataclass(frozen=True, kw_only=True, order=True)
class Case:
    """A model and its batch. ``hidden`` elements, ``seq`` tokens, ``batch`` sequences, ``vocab`` rows of the head.

    A user's own model (``FILE.py:FUNCTION``) sets its sizes itself. ``adapters``: the rank of LoRA, 0 for none.
    """

    model: str
    batch: int
    hidden: int = 0
    layers: int = 0
    seq: int = 0
    vocab: int = 0
    head_width: int = 64
    dtype: str = "float32"
    adapters: int = 0

    @property
    def panel(self) -> str:
        """The cases with the same text share a panel of the picture."""
        if not self.hidden:
            return self.model
        return f"{self.model}, hidden {self.hidden} × {self.layers} layers, {self.seq} tokens"

    @property
    def name(self) -> str:
        """The panel and the batch."""
        return f"{self.panel}, batch {self.batch}"


# -- presets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A model type of Transformers with the sizes of a model, its split, and the GPU that suits it."""

    kind: str
    config: dict[str, Any]
    sequence: int
    split: Parallelism = field(default_factory=Parallelism)
    gpu: str = "h100-sxm"


TABLES: dict[str, Any] = tomllib.loads(files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))
SOURCES: dict[str, str] = TABLES["source"]
GPUS: dict[str, dict[str, Any]] = TABLES["gpu"]
DRIVES = msgspec.convert(TABLES["drive"], dict[str, Drive])
MODELS = msgspec.convert(TABLES["model"], dict[str, ModelPreset])


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
