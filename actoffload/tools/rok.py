"""``actoffload rok``: throughput over activation memory for keep, recompute, offload and the planner's hybrid.

Each case runs in a process of its own (`rok_worker`), and is written to the results file at once. x is the peak of
saved activations in bytes, y the throughput in algorithmic TFLOP/s (recomputation is not counted).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import TimeElapsedColumn

from ..errors import ActOffloadError, ConfigError
from ..planning.profile import Profile
from ..planning.regions import choosable
from ..planning.search import Limits, best
from ..planning.simulator import Conditions, Prediction, run, simulate
from ..planning.workload import KEEP, NVME, Workload
from ..sizes import format_size
from .console import JsonOption, PathOption, grouped, option, print_json, print_rows, progress_bar
from .environment import BUSY_SHARE, describe_environment, find_device, write_json
from .on_paper import TABLES, hardware_of, preset
from .plots import draw_rok
from .rok_points import SERIES, Case, Point, Spread, Variant, is_own, verdict
from .workers import FAILURES, failure, run_worker

PREDICTED = "predicted"
"""In place of a device: nothing is run."""
OWN, OWN_BATCHES = "own", (1, 2, 4)
"""The preset of a user's own model."""
WORKER, VERSION, LIMIT_S = "actoffload.tools.rok_worker", 2, 3600.0
"""The longest time of a case."""
NO_BLOCKS = "there are no blocks to recompute: layers of one class in a ModuleList or Sequential"
OFFLOAD_READS_AHEAD = 1 << 20
"""Bytes that the series ``offload`` reads ahead; the library makes that twice the largest tensor (SSDTrain reads one
module ahead). Its default, a quarter of the bytes that a forward saves, is a whole block of four: recompute's peak."""

Sample = Mapping[str, Any]
Launch = Callable[[dict[str, Any]], dict[str, Any]]


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
    said = "A/A noise" if point.variant.series == "keep" else verdict(point.ratio, keep.ratio)
    return replace(point, tflops=_over(keep.tflops.median, point.ratio), verdict=said)


def _over(top: float, times: Spread) -> Spread:
    # The longest step has the lowest throughput, so the ends change places.
    return Spread(top / times.median, top / times.high, top / times.low)


def _point(case: Case, variant: Variant, samples: Sequence[Sample]) -> Point:
    budget = next((s["device_budget"] for s in samples if s.get("device_budget") is not None), None)
    point = Point(case=case, variant=variant, device_budget=budget)
    bad = [sample for sample in samples if "error" in sample]
    if bad:  # a point that fails now and then is a failed one
        return replace(point, oom=any(s.get("oom") for s in bad), error=bad[0]["error"])
    step_s = Spread.of([s for sample in samples for s in sample["step_s"]])
    ratios = [ratio for sample in samples for ratio in sample["ratios"]]
    compared = [sample["identical"] for sample in samples if sample["identical"] is not None]
    return replace(
        point,
        peak_bytes=round(median(peak for sample in samples for peak in sample["peak_bytes"])),
        step_s=step_s,
        tflops=_over(samples[0]["flops"] / 1e12, step_s),
        ratio=Spread.of(ratios) if ratios else None,
        identical=all(compared) if compared else None,
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
    raise typer.Exit(finish(rok.payload, rok.file, as_json))


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


def finish(payload: dict[str, Any], file: Path, as_json: bool) -> int:
    """Draw and compare; return 1 if losses or gradients differ, or a point failed otherwise than by a lack of room."""
    points, machine = points_of(payload["samples"]), payload["environment"]
    share = max((s.get("others_cpu_share") or 0.0 for s in payload["samples"]), default=0.0)
    device, torch = payload["measured_with"].get("device"), f"torch {machine.get('torch')}"
    title = f"{machine.get('gpu') or machine.get('cpu')}, {torch}"
    if device == PREDICTED:
        title = f"PREDICTED from shapes, nothing was run\n{machine['gpu']}"
    if share <= BUSY_SHARE or device == PREDICTED:
        share = 0.0
    busy = f"the machine was busy: others took up to {share:.0%} of the processors" if share else ""
    pictures = [file.with_suffix(ending) for ending in (".png", ".svg")]
    drawn = f"written beside {file.name}: {', '.join(picture.name for picture in pictures)}"
    try:
        if points:
            draw_rok(points, pictures, "\n".join(filter(None, (title, busy))))
    except ImportError:
        drawn = "a picture needs matplotlib: pip install actoffload[plots]"
    if as_json:
        print_json({"points": [point.as_dict() for point in points], "busy_share": share})
    else:
        show(points, busy)
        typer.echo(drawn)
    return 1 if any(p.failed or p.identical is False for p in points) else 0


def show(points: Sequence[Point], busy: str) -> None:
    """Print a table for each case, in 80 columns, and the warnings."""
    console = Console()
    for case in dict.fromkeys(point.case for point in points):
        mine = [point for point in points if point.case == case]
        mine.sort(key=lambda point: (SERIES.index(point.variant.series), point.peak_bytes))
        rows = [(point.variant.label, *_cells(point)) for point in mine]
        print_rows(rows, "series", "peak", "step", "× keep", "verdict", title=case.name)
    console.print("peak: saved activations; × keep: within the same turn (middle half)", style="dim", markup=False)
    if busy:
        console.print(f"WARNING: {busy}; trust verdicts, not single figures.", style="bold yellow", markup=False)
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
