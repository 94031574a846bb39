"""The recompute-offload-keep curve in numbers: what is measured, and points from samples. Pure.

x is the peak of saved activations in bytes, y the throughput in algorithmic TFLOP/s (recomputing is not counted).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median, quantiles
from typing import Any

SERIES = ("keep", "recompute", "offload", "hybrid")
SIMULATED = "sim"
"""The type of the simulated device of `actoffload.testing.simulated_device`."""
PREDICTED = "predicted"
"""In place of a device: nothing is run."""
OWN = "own"
"""The preset of a user's own model: on the accelerator where there is one."""
LEAST_NOISE = 0.01
"""How far apart two steps of keep are taken to lie at least, as a share."""
BACKWARD_FACTOR = 3
"""FLOPs of a step over those of its forward."""

Sample = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, order=True)
class Case:
    """One workload. ``hidden`` elements, ``seq`` tokens, ``batch`` sequences, ``vocab`` rows of the head.

    A user's own model (``FILE.py:FUNCTION``) has its sizes itself.
    """

    model: str
    batch: int
    hidden: int = 0
    layers: int = 0
    seq: int = 0
    vocab: int = 0
    head_width: int = 64
    dtype: str = "float32"

    @property
    def panel(self) -> str:
        """What it shares a panel of the picture with."""
        if not self.hidden:
            return self.model
        return f"{self.model}, hidden {self.hidden} × {self.layers} layers, {self.seq} tokens"

    @property
    def name(self) -> str:
        """The panel and the batch."""
        return f"{self.panel}, batch {self.batch}"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A series and, for ``hybrid``, its budget: a share of the peak with all kept, or ``"recompute"`` for its peak."""

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
        warm_up: steps of each variant before the timed ones, enough for a plan to settle.
        steps: timed turns of each round; in each, every variant takes a step, ``keep`` the first and the last.
        repeats: rounds, each in a process of its own.
        threads: CPU threads of PyTorch; None for its own choice.
        device: ``"cpu"`` or the accelerator's type; empty for the accelerator where there is one.
        gpu: the GPU, by its name in `estimate`, that steps are predicted for; empty where they are run.
        series: what is run, ``keep`` first.
    """

    cases: tuple[Case, ...]
    levels: tuple[str, ...] = ("recompute", "0.4")
    warm_up: int = 4
    steps: int = 10
    repeats: int = 2
    threads: int | None = None
    device: str = ""
    gpu: str = ""
    series: tuple[str, ...] = SERIES

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What is run of each case, those first that others need."""
        plain = [Variant(series=name) for name in self.series]
        return (*plain, *(Variant(series="hybrid", level=level) for level in self.levels))

    def on_paper(self, gpu: str) -> Preset:
        """Return what predicts it, each case once, for a GPU that `estimate` knows."""
        once = replace(self, gpu=gpu, device=PREDICTED, series=SERIES)
        return replace(once, warm_up=0, steps=1, repeats=1, threads=None)


def _grid(models: Iterable[str], shapes: Iterable[tuple[int, int, Sequence[int]]], **common: Any) -> tuple[Case, ...]:
    """Return the cases of every model in every shape: hidden, layers, batches."""
    sizes = [(hidden, layers, batch) for hidden, layers, batches in shapes for batch in batches]
    vocab = common.pop("vocab")
    return tuple(
        Case(model=m, hidden=h, layers=n, batch=b, vocab=vocab[m], **common) for m in models for h, n, b in sizes
    )


_PAPER_VOCAB = {"gpt": 50304, "bert": 30592, "t5": 32128}
_SMALL_VOCAB = dict.fromkeys(("gpt", "bert", "gpt-small"), 1024)
_PAPER = {"seq": 1024, "head_width": 128, "dtype": "bfloat16", "vocab": _PAPER_VOCAB}
PRESETS = {
    "ssdtrain": Preset(
        cases=_grid(("gpt", "bert", "t5"), ((8192, 4, (16,)), (12288, 3, (16,)), (16384, 2, (16,))), **_PAPER)
        + _grid(("bert",), ((12288, 3, (4, 8, 32)), (14336, 3, (4, 8, 16, 32))), **_PAPER)
    ),
    "ssdtrain-batches": Preset(
        cases=_grid(("gpt", "bert", "t5"), ((8192, 4, (4, 8, 16, 32)), (12288, 3, (4, 8, 16, 32))), **_PAPER),
        levels=("0.4",),
    ),
    "cpu": Preset(
        cases=_grid(("gpt", "bert"), ((256, 8, (2, 4)),), seq=256, vocab=_SMALL_VOCAB),
        repeats=1,
        threads=1,
        device="cpu",
    ),
    # In virtual time, so that it is the same on every machine. The planner times the host, which has no such time.
    "simulated": Preset(
        cases=_grid(("gpt-small",), ((256, 8, (2, 4, 8)),), seq=256, vocab=_SMALL_VOCAB),
        series=("keep", "recompute", "offload"),
        levels=(),
        warm_up=1,
        steps=2,
        repeats=1,
        threads=1,
        device=SIMULATED,
    ),
    OWN: Preset(cases=()),
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
"""``ssdtrain``: the shapes of SSDTrain's figures 6 and 7, for a GPU; ``ssdtrain-batches``: its models in the
batches of figure 7. ``cpu``: small. ``tiny``: for tests."""


@dataclass(frozen=True)
class Spread:
    """A median with the middle half of the values around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return that of one or more values."""
        low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(median(values), low, high)


@dataclass(frozen=True, kw_only=True)
class Point:
    """All samples of one variant of one case.

    It has one attribute for each column of the results, so there are more than fifteen.

    Attributes:
        case: the workload.
        variant: the series and its level.
        device_budget: bytes; None without one.
        peak_bytes: peak of saved activations on the device in a step: its median over the timed steps; 0 where
            nothing was measured.
        worst_peak_bytes: the highest of them.
        process_peak_bytes: peak resident memory of the process in a step; None on an accelerator.
        step_s: seconds of a step; None where nothing was measured, as all below.
        tflops: throughput, 10¹² FLOP/s: keep's at its median step, over the ratio; without a ratio that of the steps.
        ratio: step time over that of keep in the same turn; of keep itself, one of its two steps over the other
            (the A/A noise, around 1). None where keep was not measured.
        verdict: what the ratio says next to the A/A noise; empty where there is none.
        identical: whether losses and gradients are those of ``keep``, bit for bit; None where nothing was compared.
        oom: whether it ran out of memory.
        below_floor: whether its budget is below what any plan reaches.
        error: what went wrong; empty when nothing did.
    """

    case: Case
    variant: Variant
    device_budget: int | None = None
    peak_bytes: int = 0
    worst_peak_bytes: int = 0
    process_peak_bytes: int | None = None
    step_s: Spread | None = None
    tflops: Spread | None = None
    ratio: Spread | None = None
    verdict: str = ""
    identical: bool | None = None
    oom: bool = False
    below_floor: bool = False
    error: str = ""

    @property
    def label(self) -> str:
        """The variant and the batch."""
        return f"{self.variant.label}, batch {self.case.batch}"

    @property
    def failed(self) -> bool:
        """Whether it went wrong otherwise than by running out of memory or by a budget that no plan reaches."""
        return bool(self.error) and not self.oom and not self.below_floor

    def as_dict(self) -> dict[str, Any]:
        """Return one row, ready for JSON."""
        row = asdict(self)
        return {**row.pop("case"), **row.pop("variant"), **row}


def points_of(samples: Sequence[Sample]) -> list[Point]:
    """Return points from the samples of a results file."""
    groups: dict[tuple[Case, Variant], list[Sample]] = {}
    for sample in samples:
        key = Case(**sample["case"]), Variant(series=sample["series"], level=sample["level"])
        groups.setdefault(key, []).append(sample)
    points = [_point(case, variant, mine) for (case, variant), mine in groups.items()]
    keeps = {point.case: point for point in points if point.variant.series == "keep"}
    return [_against(keeps.get(point.case), point) for point in points]


def _against(keep: Point | None, point: Point) -> Point:
    """Return a point with its verdict, and with the throughput that its turns show: keep's, over the ratio."""
    if keep is None or keep.ratio is None or keep.tflops is None or point.ratio is None:
        return point
    top, ratio = keep.tflops.median, point.ratio
    tflops = Spread(top / ratio.median, top / ratio.high, top / ratio.low)
    said = "A/A noise" if point.variant.series == "keep" else verdict(ratio, keep.ratio)
    return replace(point, tflops=tflops, verdict=said)


def _point(case: Case, variant: Variant, samples: Sequence[Sample]) -> Point:
    budget = next((s["device_budget"] for s in samples if s.get("device_budget") is not None), None)
    point = Point(case=case, variant=variant, device_budget=budget)
    bad = [sample for sample in samples if "error" in sample]
    if bad:  # a point that fails now and then is a failed one
        oom, below_floor = any(s.get("oom") for s in bad), any(s.get("below_floor") for s in bad)
        return replace(point, oom=oom, below_floor=below_floor, error=bad[0]["error"])
    step_s = Spread.of([s for sample in samples for s in sample["step_s"]])
    teraflop = samples[0]["flops"] / 1e12
    peaks = [peak for sample in samples for peak in sample["peak_bytes"]]
    process = [s["process_peak_bytes"] for s in samples if s["process_peak_bytes"] is not None]
    ratios = [ratio for sample in samples for ratio in sample["ratios"]]
    compared = [sample["identical"] for sample in samples if sample["identical"] is not None]
    return replace(
        point,
        peak_bytes=round(median(peaks)),
        worst_peak_bytes=max(peaks),
        process_peak_bytes=round(median(process)) if process else None,
        step_s=step_s,
        tflops=Spread(teraflop / step_s.median, teraflop / step_s.high, teraflop / step_s.low),
        ratio=Spread.of(ratios) if ratios else None,
        identical=all(compared) if compared else None,
    )


def verdict(ratio: Spread, noise: Spread) -> str:
    """Return what a ratio to keep says: a difference only where its middle half lies outside the A/A noise's.

    The noise counts as 1 % at least: virtual time has none, and is no more exact than that.

    >>> verdict(Spread(1.3, 1.2, 1.4), Spread(1.0, 0.9, 1.1)), verdict(Spread(1.05, 1.0, 1.2), Spread(1.0, 0.9, 1.1))
    ('slower', 'as keep')
    """
    if ratio.low > max(noise.high, 1 + LEAST_NOISE):
        return "slower"
    return "faster" if ratio.high < min(noise.low, 1 - LEAST_NOISE) else "as keep"
