"""``actoffload rok``: throughput over activation memory for keep, recompute, offload and the planner's hybrid.

Each case runs in a process of its own (`rok_worker`), and is written to the results file at once. x is the peak of
saved activations in bytes, y the throughput in algorithmic TFLOP/s (recomputation is not counted).
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import TimeElapsedColumn

from ..errors import ActOffloadError, ConfigError
from ..sizes import format_size
from .console import JsonOption, PathOption, grouped, option, print_busy, print_json, print_rows, progress_bar
from .environment import BUSY_SHARE, describe_environment, find_device, write_json
from .estimate import predict_variant
from .on_paper import TABLES, Case, hardware_of, is_own, preset
from .workers import FAILURES, failure, run_worker

PREDICTED = "predicted"
"""In place of a device: nothing is run."""
OWN, OWN_BATCHES = "own", (1, 2, 4)
"""The preset of a user's own model."""
WORKER, VERSION, LIMIT_S = "actoffload.tools.rok_worker", 2, 3600.0
"""The longest time of a case."""
LEAST_NOISE = 0.01
"""Two steps of keep are taken to differ by this share at least."""
SERIES = ("keep", "recompute", "offload", "hybrid")
LINES = {"keep": (":", "s"), "recompute": ("--", "^"), "offload": ("-.", "D"), "hybrid": ("-", "oPX*hv")}
"""The line and the marker of each series, in the order of the legend. The hybrid has a marker for each budget."""
COLOURS = {"keep": "black", "recompute": "#d55e00", "offload": "#009e73", "hybrid": "#0072b2"}
"""Okabe and Ito's, which colour-blind people can tell apart."""
COLUMN = 3.3
"""The width of a paper's column in inches."""
LETTERS = 60
"""The letters that fit in it."""

Sample = Mapping[str, Any]
Launch = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A series and, for ``hybrid``, its budget: a share of the peak with all kept, or ``"recompute"`` for its peak."""

    series: str
    level: str = ""

    @property
    def label(self) -> str:
        """The series and its budget, as in ``"hybrid ≤ 40% of keep"``."""
        if not self.level:
            return self.series
        return f"{self.series} ≤ {self.level if self.level in SERIES else f'{float(self.level):.0%} of keep'}"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Cases, and how they are measured. Keep, the first series, takes both ends of each turn.

    Attributes:
        levels: budgets of the hybrid; it always runs without one, too.
        warm_up: steps of each variant before the timed ones, enough for a plan to settle.
        steps: timed turns.
        threads: CPU threads of PyTorch; None for its own choice.
        device: ``"cpu"`` or the accelerator's type; empty for the accelerator if there is one.
        gpu: the GPU of `estimate` that steps are predicted for; empty if they are run.
    """

    cases: tuple[Case, ...]
    levels: tuple[str, ...] = ("recompute", "0.4")
    warm_up: int = 4
    steps: int = 10
    threads: int | None = None
    device: str = ""
    gpu: str = ""

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants of each case; each comes after the variants whose peaks are its budgets."""
        plain = [Variant(series=name) for name in SERIES]
        return (*plain, *(Variant(series="hybrid", level=level) for level in self.levels))


def _preset(row: dict[str, Any]) -> Preset:
    """Return a preset of the table: every model in every shape and batch of its grid."""
    cases = []
    for shape in row["grid"]:
        sizes = {name: size for name, size in shape.items() if name not in ("models", "batches")}
        for model in shape["models"]:
            vocab = {} if "vocab" in sizes else {"vocab": TABLES["transformers"][model]["vocab"]}
            cases += [{"model": model, "batch": batch, **sizes, **vocab} for batch in shape["batches"]]
    return msgspec.convert({"cases": cases, **row}, Preset)


PRESETS = {name: _preset(row) for name, row in TABLES["rok"].items()}


# -- points -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A median with the middle half of the values around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(median(values), low, high)


def verdict(ratio: Spread, noise: Spread) -> str:
    """Compare a ratio to keep with the A/A noise: a difference needs a middle half that lies outside the noise's.

    The noise counts as 1 % at least: predictions have none, and are no more exact than that.

    >>> verdict(Spread(1.3, 1.2, 1.4), Spread(1.0, 0.9, 1.1)), verdict(Spread(1.05, 1.0, 1.2), Spread(1.0, 0.9, 1.1))
    ('slower', 'as keep')
    """
    if ratio.low > max(noise.high, 1 + LEAST_NOISE):
        return "slower"
    return "faster" if ratio.high < min(noise.low, 1 - LEAST_NOISE) else "as keep"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One variant of one case. None, or 0 bytes: nothing was measured.

    Attributes:
        peak_bytes: of saved activations on the device, median over the timed steps.
        tflops: keep's throughput at its median step, over the ratio; without a ratio that of the steps.
        ratio: step time over keep's in the same turn; of keep, one of its two steps over the other: A/A noise.
        identical: whether losses and gradients equal keep's bit for bit.
        oom: whether there was no room, in memory or under a budget below the floor of every plan.
    """

    case: Case
    variant: Variant
    device_budget: int | None = None
    peak_bytes: int = 0
    step_s: Spread | None = None
    tflops: Spread | None = None
    ratio: Spread | None = None
    verdict: str = ""
    identical: bool | None = None
    oom: bool = False
    error: str = ""

    @property
    def label(self) -> str:
        """The variant and the batch."""
        return f"{self.variant.label}, batch {self.case.batch}"

    def as_dict(self) -> dict[str, Any]:
        """Return one row, ready for JSON."""
        row = asdict(self)
        return {**row.pop("case"), **row.pop("variant"), **row}


def points_of(samples: Sequence[Sample]) -> list[Point]:
    """Return the points of a results file, whose samples are each another variant or case."""
    points = [_point(sample) for sample in samples]
    keeps = {point.case: point for point in points if point.variant.series == "keep"}
    for place, point in enumerate(points):
        keep = keeps.get(point.case)
        if keep is None or keep.ratio is None or keep.tflops is None or point.ratio is None:
            continue
        said = "A/A noise" if point is keep else verdict(point.ratio, keep.ratio)
        # The throughput that its turns show: keep's, over the ratio.
        points[place] = replace(point, tflops=_over(keep.tflops.median, point.ratio), verdict=said)
    return points


def _over(top: float, times: Spread) -> Spread:
    # The longest step has the lowest throughput, so the ends change places.
    return Spread(top / times.median, top / times.high, top / times.low)


def _point(sample: Sample) -> Point:
    variant = Variant(series=sample["series"], level=sample["level"])
    point = Point(case=Case(**sample["case"]), variant=variant, device_budget=sample.get("device_budget"))
    if "error" in sample:
        return replace(point, oom=bool(sample.get("oom")), error=sample["error"])
    step_s = Spread.of(sample["step_s"])
    return replace(
        point,
        peak_bytes=round(median(sample["peak_bytes"])),
        step_s=step_s,
        tflops=_over(sample["flops"] / 1e12, step_s),
        ratio=Spread.of(sample["ratios"]) if sample["ratios"] else None,
        identical=sample["identical"],
    )


# -- cases ------------------------------------------------------------------------------------------------------------


class RokRun:
    """One run, whose results go into a new ``file``.

    ``about``: ``environment`` and ``command`` of the results. ``launch`` measures a case; a failure is a result, too.
    ``path``: directories of the spool, which the results do not name.
    """

    def __init__(
        self, preset: Preset, file: Path, about: dict[str, Any], launch: Launch, path: list[str] | None = None
    ) -> None:
        if file.exists():
            raise ConfigError("out", str(file), "there is such a file already; name a new one, or remove it")
        self.file, self.cases, self._launch, self._path = file, preset.cases, launch, path
        names = ("threads", "warm_up", "steps", *(["gpu"] if preset.gpu else []))
        how = {name: getattr(preset, name) for name in names}
        how |= {"device": preset.device or find_device(), "variants": list(map(asdict, preset.variants))}
        self._how: dict[str, Any] = how
        self.payload: dict[str, Any] = {"benchmark": "rok", "version": VERSION, **about}
        self.payload |= {"measured_with": how, "samples": []}

    def run(self) -> Generator[tuple[Case, list[dict[str, Any]]]]:
        """Measure each case; yield it with its samples, one for each variant, when they are in the file."""
        environment = self.payload["environment"]
        for case in self.cases:
            result = self._launch(self._how | {"case": asdict(case), "path": self._path})
            head = {"case": asdict(case), "commit": environment.get("commit")}
            head["others_cpu_share"] = result.pop("others_cpu_share", None)
            # A case that failed as a whole failed in each variant.
            samples = [head | one for one in result.get("samples", [result | v for v in self._how["variants"]])]
            self.payload["samples"] += samples
            environment["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            # After each case, so that an interrupt loses the running one at most.
            write_json(self.file, self.payload)
            yield case, samples


# -- predicted cases --------------------------------------------------------------------------------------------------


def predict(spec: dict[str, Any]) -> dict[str, Any]:
    """Predict a case on meta tensors, for the GPU that ``gpu`` names; return ``samples``, as a measured case does."""
    import torch

    from .models import build, profiles_of
    from .saved_bytes import BACKWARD_FACTOR

    case = Case(**spec["case"])
    try:
        base, plain, step = profiles_of(build(case, torch.device("meta")), case.batch, hardware_of(spec["gpu"]))
    except FAILURES as error:
        return failure(error)
    peaks: dict[str, int] = {}
    samples = []
    for variant in (Variant(**one) for one in spec["variants"]):
        samples.append(sample := asdict(variant) | {"flops": BACKWARD_FACTOR * step.forward_flops})
        try:
            budget = budget_of(variant.level, plain.baseline_peak_bytes, peaks)
            found = predict_variant(base, plain, variant.series, budget)
        except ActOffloadError as error:
            sample |= failure(error)
            continue
        peaks[variant.series] = found.peak_bytes
        sample |= {"device_budget": budget, "identical": None, "ratios": [found.step_s / plain.step_s]}
        sample |= {"step_s": [found.step_s], "peak_bytes": [found.peak_bytes]}
    return {"samples": samples}


def budget_of(level: str, whole: int | None, peaks: Mapping[str, int | None]) -> int | None:
    """Return the bytes of a hybrid's level: a share of ``whole``, or another series' peak; None without a level."""
    if not level:
        return None
    peak, share = (peaks.get(level), 1.0) if level in SERIES else (whole, float(level))
    if peak is None:
        raise ActOffloadError(f"no budget: the peak for {level} is not known")
    return int(share * peak)


# -- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The user's choice; None for the preset's."""

    preset: Annotated[str | None, option(f"One of {', '.join(PRESETS)}; default: cpu.")] = None
    gpu: Annotated[str | None, option("Run nothing: predict from shapes, for this GPU of `estimate --presets`.")] = None
    model: Annotated[str | None, option("Your own, FILE.py:FUNCTION; or the preset's cases of this model.")] = None
    batch: Annotated[
        list[int] | None,
        option("Samples of your own model's batches; repeat. Or only the preset's cases of these.", min=1),
    ] = None
    steps: Annotated[int | None, option("Default: the preset's.", min=1)] = None

    def run(self, out: Path | None, path: list[str] | None) -> RokRun:
        """Return the run for these options."""
        own = self.model is not None and is_own(self.model)
        name = self.preset or (OWN if own else "cpu")
        chosen = preset("preset", name, PRESETS)
        chosen = replace(chosen, cases=self._cases(chosen.cases, own), steps=self.steps or chosen.steps)
        command = f"actoffload rok --preset {name} --steps {chosen.steps}"
        file = f"rok_{Path(str(self.model)).stem if own else name}"
        environment = describe_environment()
        launch: Launch = partial(run_worker, WORKER, limit_s=LIMIT_S)
        if self.gpu is not None:
            machine, launch = hardware_of(self.gpu), predict
            rates = f"{machine.write_bytes_per_s / 1e9:.0f} GB/s out, {machine.read_bytes_per_s / 1e9:.0f} back"
            speed = f"{machine.flops_per_s / 1e12:.0f} TFLOP/s"
            environment["gpu"] = f"{self.gpu}, {speed}; {machine.drives} SSDs, {rates}"
            # A prediction has no noise and no plan that has to settle.
            once: dict[str, Any] = {"warm_up": 0, "steps": 1, "threads": None}
            chosen = replace(chosen, gpu=self.gpu, device=PREDICTED, **once)
            command, file = f"actoffload rok --preset {name} --gpu {self.gpu}", f"{file}_{self.gpu}"
        about = {"command": command, "environment": environment}
        return RokRun(chosen, out or Path(f"{file}.json"), about, launch, path)

    def _cases(self, cases: tuple[Case, ...], own: bool) -> tuple[Case, ...]:
        """Return the user's own model in its batches, or the preset's cases of the model and of the batches."""
        if own:
            from .models import import_function

            import_function("model", str(self.model))  # an error there ends the command, not every case
            return tuple(Case(model=str(self.model), batch=size) for size in self.batch or OWN_BATCHES)
        for name, wanted in (("model", self.model and [self.model]), ("batch", self.batch)):
            cases = tuple(case for case in cases if not wanted or getattr(case, name) in wanted)
            if not cases:
                remedy = "the preset has no such case; your own is FILE.py:FUNCTION"
                raise ConfigError(name, wanted and wanted[0], remedy)
        return cases


@grouped
def command(
    measured: Measured,
    out: Annotated[Path | None, option("Results (JSON), a new file. Default: rok_NAME.json.")] = None,
    path: PathOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the recompute-offload-keep curve: variants take their steps in turns, each case is kept at once.

    FUNCTION returns a model and make_batch(size), which returns the model's arguments; the model returns its loss.
    """
    rok = measured.run(out, path)
    take(rok, quiet=as_json)
    raise typer.Exit(finish(rok, as_json))


def take(run: RokRun, *, quiet: bool) -> None:
    """Measure all cases behind a progress bar."""
    total = len(run.cases)
    with progress_bar(TimeElapsedColumn(), quiet=quiet) as progress:
        if not quiet:
            progress.console.print(f"{total} cases to measure; results in {run.file}")
        bar = progress.add_task("cases", total=total)
        for case, samples in run.run():
            progress.update(bar, advance=1)
            for sample in (sample for sample in samples if "error" in sample):
                text = f"{case.name}: {sample['series']} {sample['level']}: {sample['error']}"
                progress.console.print(text, style="yellow", markup=False)


def finish(run: RokRun, as_json: bool) -> int:
    """Draw and compare; return 1 if losses or gradients differ, or a point failed otherwise than by a lack of room."""
    points, machine = points_of(run.payload["samples"]), run.payload["environment"]
    title = f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}"
    if run.payload["measured_with"]["device"] == PREDICTED:
        title = f"PREDICTED from shapes, nothing was run\n{machine['gpu']}"
    share = max(sample["others_cpu_share"] or 0.0 for sample in run.payload["samples"])
    pictures = [run.file.with_suffix(ending) for ending in (".png", ".svg")]
    drawn = f"written beside {run.file.name}: {', '.join(picture.name for picture in pictures)}"
    try:
        draw_rok(points, pictures, title)
    except ImportError:
        drawn = "a picture needs matplotlib: pip install actoffload[plots]"
    if as_json:
        busy_share = share if share > BUSY_SHARE else 0.0
        print_json({"points": [point.as_dict() for point in points], "busy_share": busy_share})
    else:
        show(points)
        print_busy(share)
        typer.echo(drawn)
    return 1 if any((p.error and not p.oom) or p.identical is False for p in points) else 0


def show(points: Sequence[Point]) -> None:
    """Print a table for each case, in 80 columns, and whether bits differ."""
    console = Console()
    for case in dict.fromkeys(point.case for point in points):
        mine = [point for point in points if point.case == case]
        mine.sort(key=lambda point: (SERIES.index(point.variant.series), point.peak_bytes))
        rows = [(point.variant.label, *_cells(point)) for point in mine]
        print_rows(rows, "series", "peak", "step", "× keep", "verdict", title=case.name)
    console.print("peak: saved activations; × keep: within the same turn (middle half)", style="dim", markup=False)
    different = [point.label for point in points if point.identical is False]
    if different:
        console.print(f"BITS DIFFER: {'; '.join(different)}", style="bold red", markup=False)
    elif any(point.identical for point in points):
        console.print("Losses and gradients are equal bit for bit in every step of every series.", style="green")


def _cells(point: Point) -> tuple[str, ...]:
    """Return a point's numbers as text and its verdict, or the reason why there are none."""
    if point.step_s is None:
        return ("-", "-", "-", point.error)
    ratio = point.ratio
    return (
        format_size(point.peak_bytes),
        f"{point.step_s.median:.3g} s",
        "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
        "BITS DIFFER" if point.identical is False else point.verdict,
    )


# -- the picture -------------------------------------------------------------------------------------------------------


def draw_rok(points: Sequence[Point], paths: Sequence[Path], title: str) -> None:
    """Draw a panel for each model and size, throughput over activation peak; upper left is better.

    A line joins a variant's batches, whose numbers stand beside its points. A band is the A/A noise of keep.
    The ending of each of ``paths`` is its format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    # Files need no display, and a machine that measures often has none.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(point.case.panel for point in points))
    columns = 1 if len(panels) <= 3 else 2
    rows = -(-len(panels) // columns)
    sizes: dict[str, Any] = {"font.size": 7.0, "axes.titlesize": "medium", "figure.titlesize": "medium"}
    with pyplot.style.context(["default", sizes]):
        shape = (COLUMN, 1.4 + 1.25 * rows)
        figure, grid = pyplot.subplots(rows, columns, figsize=shape, squeeze=False, layout="constrained")
        try:
            known: dict[str, Any] = {}
            for axis, panel in zip_longest(grid.flatten(), panels):
                if panel is None:
                    axis.set_axis_off()
                    continue
                _draw_panel(axis, [p for p in points if p.case.panel == panel])
                axis.set_title(textwrap.fill(panel, LETTERS // columns - 4))
                handles, labels = axis.get_legend_handles_labels()
                known |= dict(zip(labels, handles, strict=True))
            figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=2, frameon=False)
            figure.suptitle("\n".join(textwrap.fill(line, LETTERS) for line in title.splitlines()))
            figure.supylabel("model TFLOP/s (bars: middle half of the turns; numbers: batch)", fontsize="medium")
            for path in paths:
                figure.savefig(path, dpi=300)
        finally:
            pyplot.close(figure)


def _draw_panel(axis: Any, points: Sequence[Point]) -> None:
    axis.grid(alpha=0.15)
    axis.spines[["top", "right"]].set_visible(False)
    variants = sorted({p.variant for p in points if p.tflops}, key=lambda v: (SERIES.index(v.series), v.level))
    markers = {series: iter(kinds * len(variants)) for series, (_, kinds) in LINES.items()}
    for variant in variants:
        mine = sorted((p for p in points if p.variant == variant), key=lambda p: p.case.batch)
        _draw_variant(axis, variant, mine, next(markers[variant.series]))
    failed = {
        "no room": [p.label for p in points if p.oom],
        "not measured": [p.label for p in points if not p.tflops and not p.oom],
    }
    texts = [f"{reason}: {'; '.join(labels)}" for reason, labels in failed.items() if labels]
    axis.set_xlabel("\n".join(["activation peak", *(textwrap.fill(text, LETTERS) for text in texts)]))
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda nbytes, _: format_size(nbytes).replace(".0 ", " "))


def _draw_variant(axis: Any, variant: Variant, points: Sequence[Point], marker: str) -> None:
    """Draw a line through a variant's points, with batches and bars, and the noise of keep."""
    colour = COLOURS[variant.series]
    drawn = [(float(p.peak_bytes), p.tflops, p) for p in points if p.tflops]
    below, above = [y.median - y.low for _, y, _ in drawn], [y.high - y.median for _, y, _ in drawn]
    axis.errorbar(
        [x for x, _, _ in drawn],
        [y.median for _, y, _ in drawn],
        yerr=[below, above],
        label=variant.label,
        color=colour,
        linestyle=LINES[variant.series][0],
        linewidth=1,
        marker=marker,
        markersize=4,
        markerfacecolor="none" if variant.series == "hybrid" else colour,  # hollow, as several may lie on each other
        elinewidth=0.8,
    )
    for x, y, point in drawn:
        axis.annotate(str(point.case.batch), (x, y.median), (3, 3), textcoords="offset points", fontsize="x-small")
        if variant.series == "keep" and y.high > y.low:
            axis.axhspan(y.low, y.high, color=colour, alpha=0.1, linewidth=0, label="A/A noise of keep")
