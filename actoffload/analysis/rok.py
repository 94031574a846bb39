"""The recompute-offload-keep curve in numbers: what is measured, and points from samples. Pure.

x is the peak of saved activations in bytes, y the throughput in algorithmic TFLOP/s (recomputing is not counted).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

SERIES = ("keep", "recompute", "offload", "hybrid")
BACKWARD_FACTOR = 3
"""FLOPs of a step over those of its forward."""

Sample = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, order=True)
class Case:
    """One workload. ``hidden`` elements, ``seq`` tokens, ``batch`` sequences, ``vocab`` rows of the head."""

    model: str
    hidden: int
    layers: int
    batch: int
    seq: int
    vocab: int
    head_width: int = 64
    dtype: str = "float32"

    @property
    def panel(self) -> str:
        """What it shares a panel of the picture with."""
        return f"{self.model}, hidden {self.hidden} × {self.layers} layers, {self.seq} tokens"

    @property
    def name(self) -> str:
        """The panel and the batch."""
        return f"{self.panel}, batch {self.batch}"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A series and, for ``hybrid``, its budget: a share of the peak with all kept, or the peak of another series."""

    series: str
    level: str = ""

    @property
    def label(self) -> str:
        """``"hybrid 40%"``, ``"hybrid = recompute"``, ``"hybrid"``, ``"keep"``."""
        if not self.level:
            return self.series
        return f"{self.series} = {self.level}" if self.level in SERIES else f"{self.series} {float(self.level):.0%}"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What is measured, and how.

    Attributes:
        cases: the workloads.
        levels: budgets of the hybrid; it is always run without one, too.
        warm_up: steps before the timed ones, enough for a plan to settle.
        steps: timed steps of each sample.
        repeats: samples of each point, taken in turns.
        threads: CPU threads of PyTorch; None for its own choice.
        device: ``"cpu"`` or the accelerator's type; empty for the accelerator where there is one.
    """

    cases: tuple[Case, ...]
    levels: tuple[str, ...] = ("keep", "offload", "recompute", "0.15", "0.4", "0.65")
    warm_up: int = 8
    steps: int = 5
    repeats: int = 3
    threads: int | None = None
    device: str = ""

    def variants(self, series: Sequence[str] = SERIES) -> tuple[Variant, ...]:
        """Return what is run of each case, those first that others need."""
        plain = [Variant(series=name) for name in ("keep", "offload", "recompute", "hybrid") if name in series]
        budgets = [Variant(series="hybrid", level=level) for level in self.levels if "hybrid" in series]
        return (*plain, *(v for v in budgets if v.level not in SERIES or v.level in series))


def _grid(models: Iterable[str], shapes: Iterable[tuple[int, int, Sequence[int]]], **common: Any) -> tuple[Case, ...]:
    """Return the cases of every model in every shape: hidden, layers, batches."""
    sizes = [(hidden, layers, batch) for hidden, layers, batches in shapes for batch in batches]
    vocab = common.pop("vocab")
    return tuple(
        Case(model=m, hidden=h, layers=n, batch=b, vocab=vocab[m], **common) for m in models for h, n, b in sizes
    )


_PAPER_VOCAB = {"gpt": 50304, "bert": 30592, "t5": 32128}
_SMALL_VOCAB = dict.fromkeys(("gpt", "bert", "t5", "gpt-small"), 1024)
_PAPER = {"seq": 1024, "head_width": 128, "dtype": "bfloat16", "vocab": _PAPER_VOCAB}
PRESETS = {
    "ssdtrain": Preset(
        cases=_grid(("gpt", "bert", "t5"), ((8192, 4, (16,)), (12288, 3, (16,)), (16384, 2, (16,))), **_PAPER)
        + _grid(("bert",), ((12288, 3, (4, 8, 32)), (14336, 3, (4, 8, 16, 32))), **_PAPER)
    ),
    "cpu": Preset(
        cases=_grid(("gpt", "bert", "t5"), ((256, 4, (4, 8)), (384, 4, (4,))), seq=256, vocab=_SMALL_VOCAB),
        threads=2,
        device="cpu",
    ),
    "tiny": Preset(
        cases=_grid(("gpt-small",), ((128, 2, (2, 4)),), seq=128, vocab=_SMALL_VOCAB),
        levels=("0.6",),
        warm_up=3,
        steps=2,
        repeats=1,
        threads=1,
        device="cpu",
    ),
}
"""``ssdtrain``: the shapes of SSDTrain's figures 6 and 7, for a GPU. ``cpu``: small. ``tiny``: for tests."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """All samples of one variant of one case.

    Attributes:
        case: the workload.
        variant: the series and its level.
        device_budget: bytes; None without one.
        peak_bytes: the most of saved activations on the device in any timed step; None where nothing was measured.
        step_s: median of all timed steps.
        tflops: throughput at ``step_s``, 10¹² FLOP/s.
        spread: how far the samples' medians lie apart, of one sample its steps, as a share of ``step_s``.
        samples: how many there are.
        identical: whether all losses are those of ``keep``, bit for bit; None where there is nothing to compare.
        oom: whether it ran out of memory.
        below_floor: whether its budget is below what any plan reaches.
        error: what went wrong; empty when nothing did.
        efficient: whether no point of its panel has less memory and more throughput.
    """

    case: Case
    variant: Variant
    device_budget: int | None = None
    peak_bytes: int | None = None
    step_s: float | None = None
    tflops: float | None = None
    spread: float = 0.0
    samples: int = 0
    identical: bool | None = None
    oom: bool = False
    below_floor: bool = False
    error: str = ""
    efficient: bool = False

    @property
    def measured(self) -> bool:
        """Whether it can be drawn."""
        return self.peak_bytes is not None and self.tflops is not None

    @property
    def label(self) -> str:
        """The variant and the batch."""
        return f"{self.variant.label}, batch {self.case.batch}"

    def as_dict(self) -> dict[str, Any]:
        """Return one flat row."""
        row = asdict(self)
        return {**row.pop("case"), **row.pop("variant"), **row}


def points_of(samples: Sequence[Sample]) -> list[Point]:
    """Return points from the samples of a results file."""
    groups: dict[tuple[Case, Variant], list[Sample]] = {}
    for sample in samples:
        key = Case(**sample["case"]), Variant(series=sample["series"], level=sample["level"])
        groups.setdefault(key, []).append(sample)
    points = [_point(case, variant, mine, _reference(case, groups)) for (case, variant), mine in groups.items()]
    return [replace(point, efficient=_is_efficient(point, points)) for point in points]


def _reference(case: Case, groups: Mapping[tuple[Case, Variant], Sequence[Sample]]) -> list[str] | None:
    """Return the losses to compare with: those of keep, or of the first other that has some."""
    mine = [(v, s) for (c, v), found in groups.items() if c == case for s in found if s.get("losses_hex")]
    mine.sort(key=lambda pair: pair[0].series != "keep")
    return list(mine[0][1]["losses_hex"]) if mine else None


def _point(case: Case, variant: Variant, samples: Sequence[Sample], reference: Sequence[str] | None) -> Point:
    bad = [sample for sample in samples if "error" in sample]
    budget = next((s["device_budget"] for s in samples if s.get("device_budget") is not None), None)
    point = Point(case=case, variant=variant, device_budget=budget, samples=len(samples))
    if bad:  # a point that fails now and then is a failed one
        oom, below_floor = any(s.get("oom") for s in bad), any(s.get("below_floor") for s in bad)
        return replace(point, oom=oom, below_floor=below_floor, error=bad[0]["error"])
    step_s = median(s for sample in samples for s in sample["step_s"])
    times = [median(sample["step_s"]) for sample in samples] if len(samples) > 1 else samples[0]["step_s"]
    return replace(
        point,
        peak_bytes=max(sample["activation_peak_bytes"] for sample in samples),
        step_s=step_s,
        tflops=samples[0]["flops"] / step_s / 1e12,
        spread=(max(times) - min(times)) / step_s,
        identical=None if reference is None else all(list(s["losses_hex"]) == list(reference) for s in samples),
    )


def _is_efficient(point: Point, points: Iterable[Point]) -> bool:
    """Return whether no point of its panel is as good both ways and better in one."""
    if not point.measured:
        return False
    mine = (-(point.peak_bytes or 0), point.tflops or 0.0)
    panel = [p for p in points if p.measured and p.case.panel == point.case.panel]
    others = [(-(p.peak_bytes or 0), p.tflops or 0.0) for p in panel]
    return not any(other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in others)
