"""Hook cost, per-tensor scaling, and the spool against fio; each figure with its bound and whether it holds.

    python -m benchmarks.micro [--parts hooks scaling spool] [--path DIR] [--rounds N] [--blocks BYTES ...]

Prints and records what a saved tensor costs the training thread above hooks that do nothing (processor time of that
thread; wall-clock time, waits included, beside it), what one that leaves an accelerator asks of it, what a plan that
keeps everything costs a small step, how the hooks scale to 100,000 tensors alive, and how much of what fio reaches the
spool reaches. Where fio or an engine is missing it says so and leaves those rows out. Status 1 when a
bound does not hold.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks import harness, micro_hooks, micro_spool
from benchmarks.harness import Bound, Sample, Samples, middle

PARTS = ("hooks", "step", "scaling", "spool")
HOOK_BOUNDS_US = {"parameter": 3.0, "small": 3.0, "policy": 10.0, "device kept": 10.0, "device": 60.0}
"""By kind of tensor. What moves on the CPU has no bound: its cost is reported, and whole steps are judged."""
CALL_BOUNDS = {"records": 2.0, "waits": 2.0, "queries": 1.0}
"""What one tensor's way to the host and back may ask of its device, timed waits included."""
STEPS = {
    micro_hooks.STEP: "small step, a plan keeps all",
    micro_hooks.DEFAULT_STEP: "small step, default policy",
}
STEP_BOUND = 1.10
FLAT = 1.3
OF_FIO = 0.9
MOVED_BYTES, SMALL_BYTES = 128 << 10, 512
SCALED = ("small", "policy", "moves")
BLOCKS = (1 << 20, 4 << 20, 8 << 20)
TIMEOUT_S = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result file; 1 when a bound does not hold."""
    parser = harness.make_parser(__doc__, rounds=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--pairs", type=int, default=31, help="bare and ours in turns, in each sample of the hooks")
    parser.add_argument("--few", type=int, default=1_000, help="tensors alive at once")
    parser.add_argument("--many", type=int, default=100_000, help="tensors alive at once, for the scaling")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, help="bytes of a transfer")
    parser.add_argument("--depth", type=int, default=4, help="transfers at the same time")
    parser.add_argument("--region", type=int, default=512, help="MiB of each engine's file")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each sample of the disk")
    options = parser.parse_args(arguments)
    results = harness.Results("micro", arguments, vars(options))
    samples: Samples = {}
    if "hooks" in options.parts:
        spec = {"tensors": options.few, "chains": 1, "pairs": options.pairs, "nbytes": MOVED_BYTES}
        samples["hooks"] = _take({kind: spec | {"kind": kind} for kind in micro_hooks.KINDS}, options)
    if "step" in options.parts:
        samples["step"] = _take({kind: {"kind": kind, "pairs": options.pairs} for kind in STEPS}, options)
    if "scaling" in options.parts:
        samples["scaling"] = take_scaling(options)
    path = options.path or tempfile.gettempdir()
    disk = {"region": options.region << 20, "seconds": options.seconds, "rounds": options.rounds}
    if "spool" in options.parts:
        samples["spool"] = list(micro_spool.against_fio(path, options.blocks, depth=options.depth, **disk))
    return 0 if results.finish(render(samples), judge(samples), samples=samples) else 1


def take_scaling(options: argparse.Namespace) -> list[Sample]:
    """Few and many tensors alive at once, in turns; as many chains of few as make about a tenth of many."""
    specs = {}
    for kind in SCALED:
        for count in (options.few, options.many):
            chains = max(1, options.many // (10 * count))
            shape = {"tensors": count, "chains": chains, "pairs": 2, "nbytes": SMALL_BYTES}
            specs[f"{kind} {count}"] = {"kind": kind, **shape}
    return _take(specs, options)


def _take(specs: dict[str, dict[str, object]], options: argparse.Namespace) -> list[Sample]:
    """Samples in processes of their own, in turns (A B A B), so that a drift of the machine falls on all alike."""
    taken = []
    for name, spec in [*specs.items()] * options.rounds:
        found = harness.run_sample("benchmarks.micro_hooks", spec | {"path": options.path}, timeout_s=TIMEOUT_S)
        print(f"{name}: {found.get('error') or 'measured'}", flush=True)
        taken.append({"kind": spec["kind"], "alive": spec.get("tensors"), "nbytes": spec.get("nbytes"), **found})
    return taken


def above_bare_us(samples: Sequence[Sample], clock: str) -> float | None:
    """Median over all pairs of (ours - bare) for one tensor, in microseconds."""
    costs = [
        (pair["ours"][clock] - pair["bare"][clock]) / sample["tensors"] * 1e6
        for sample in samples
        for pair in sample.get("pairs", ())
    ]
    return median(costs) if costs else None


def by(samples: Iterable[Sample], *keys: str) -> dict[Any, list[Sample]]:
    """The samples by their values of some keys; of one key, by its value."""
    found: dict[Any, list[Sample]] = {}
    for sample in samples:
        values = tuple(sample[key] for key in keys)
        found.setdefault(values if len(keys) > 1 else values[0], []).append(sample)
    return found


def judge(samples: Samples) -> list[Bound]:
    """The bounds of what was measured."""
    hooks, steps, scaled = (by(samples.get(part, ()), "kind") for part in ("hooks", "step", "scaling"))
    bounds = []
    for kind, limit in HOOK_BOUNDS_US.items():
        if kind in hooks:
            cost_us = above_bare_us(hooks[kind], "thread_s")
            bounds.append(Bound(f"hook: {micro_hooks.KINDS[kind]}", cost_us, limit, unit=" µs"))
    asked = [sample["calls"] for sample in hooks.get("device", ()) if "calls" in sample]
    for name, most in CALL_BOUNDS.items() if asked else ():
        bounds.append(Bound(f"null device: {name} for one tensor", middle(asked, name), most))
    for kind, what in STEPS.items() if steps else ():
        bounds.append(Bound(what, step_ratio(steps.get(kind, ())), STEP_BOUND, unit=" × keep"))
    bounds += [_flatness(kind, scaled[kind]) for kind in SCALED if kind in scaled]
    for name, own, fio in rates_of(samples.get("spool", ())):
        if fio is not None:
            bounds.append(Bound(f"spool: {name}, of fio", own / fio, OF_FIO, at_most=False, unit=" ×"))
    return bounds


def step_ratio(samples: Sequence[Sample]) -> float | None:
    """Median over all pairs of a step's time over that of a step without the library."""
    pairs = [pair for sample in samples for pair in sample.get("pairs", ())]
    return median(pair["ours"]["wall_s"] / pair["bare"]["wall_s"] for pair in pairs) if pairs else None


def _flatness(kind: str, samples: list[Sample]) -> Bound:
    by_count = by(samples, "alive")
    few, many = min(by_count), max(by_count)
    costs = [above_bare_us(by_count[count], "thread_s") for count in (few, many)]
    ratio = costs[1] / costs[0] if costs[0] and costs[1] else None
    return Bound(f"scaling: {micro_hooks.KINDS[kind]}, {many} alive over {few}", ratio, FLAT, unit=" ×")


def rates_of(samples: Iterable[Sample]) -> list[tuple[str, float, float | None]]:
    """Median bytes per second by engine, direction and block, ours and fio's."""
    found = []
    timed = [sample for sample in samples if "bytes_per_s" in sample]
    for (engine, way, block), mine in by(timed, "mode", "direction", "block").items():
        fio = [sample["fio_bytes_per_s"] for sample in mine if "fio_bytes_per_s" in sample]
        name = f"{engine} {way}, {block >> 10} KiB"
        found.append((name, middle(mine, "bytes_per_s"), median(fio) if fio else None))
    return found


def render(samples: Samples) -> str:
    """What the bounds were made from, and what is missing."""
    failed = [sample for part in samples.values() for sample in part if "error" in sample]
    missing = dict.fromkeys(f"{s.get('mode') or s.get('kind')}: {s['error']}" for s in failed)
    missing |= dict.fromkeys(f"fio: {s['fio_error']}" for s in samples.get("spool", ()) if "fio_error" in s)
    parts = [f"Not measured: {line}\n" for line in missing]
    hooks = [*samples.get("hooks", ()), *samples.get("scaling", ())]
    if hooks:
        costs = ("a saved tensor, µs above bare hooks", "bytes", "alive", "training thread", "wall clock")
        parts.append(harness.markdown_table(costs, _hook_rows(hooks)))
    rates = rates_of(samples.get("spool", ()))
    if rates:
        gigabytes = [(name, *(None if rate is None else f"{rate / 1e9:.2f}" for rate in both)) for name, *both in rates]
        parts.append(harness.markdown_table(("GB/s", "spool", "fio"), gigabytes))
    return "\n".join(parts)


def _hook_rows(samples: list[Sample]) -> list[tuple[object, ...]]:
    rows = []
    for (kind, alive, nbytes), mine in by(samples, "kind", "alive", "nbytes").items():
        if any("pairs" in sample for sample in mine):
            costs = (f"{above_bare_us(mine, clock):.2f}" for clock in ("thread_s", "wall_s"))
            rows.append((micro_hooks.KINDS[kind], nbytes if kind == "moves" else None, alive, *costs))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
