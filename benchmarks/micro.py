"""Hook cost, per-tensor scaling, and the spool against fio; each figure with its bound and whether it holds.

    python -m benchmarks.micro [--parts hooks scaling spool busy] [--path DIR] [--rounds N] [--blocks 1MiB ...]

Prints and records what a saved tensor costs the training thread above hooks that do nothing (processor time of that
thread; wall-clock time, waits included, beside it, and what an empty Python call took meanwhile: the machine's speed
changes from hour to hour), how that changes with 100,000 tensors alive, and how much of what
fio reaches the spool reaches. Where fio or an engine is missing it says so and leaves those rows out. Status 1 when a
bound does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks import harness, micro_hooks, micro_spool
from benchmarks.harness import Bound

PARTS = ("hooks", "scaling", "spool", "busy")
STAYS_US = 3.0
MOVES_US = 60.0
FLAT = 1.3
OF_FIO = 0.9
BUSY_URING = 2.0
FEW, MANY = 1_000, 100_000
MOVED_BYTES = 128 << 10
SMALL_BYTES = 512
SCALED = ("small", "policy", "moves")
BLOCKS = (1 << 20, 4 << 20, 8 << 20)
TIMEOUT_S = 900.0

Samples = list[harness.Sample]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result file."""
    options = parse(arguments)
    path = options.path or tempfile.gettempdir()
    samples: dict[str, Samples] = {}
    if "hooks" in options.parts:
        samples["hooks"] = take_hooks(path, options)
    if "scaling" in options.parts:
        samples["scaling"] = take_scaling(path, options)
    disk = {"region": options.region << 20, "seconds": options.seconds, "rounds": options.rounds}
    if "spool" in options.parts:
        taken = micro_spool.against_fio(path, options.blocks, depth=options.depth, **disk)
        samples["spool"] = [_tell(sample) for sample in taken]
    if "busy" in options.parts:
        samples["busy"] = [_tell(sample) for sample in micro_spool.main_thread_in_python(path, **disk)]
    bounds = judge(samples)
    table = render(samples, bounds)
    target = harness.results_folder() / f"micro_{harness.stamp()}.json"
    print(f"\n{table}\nFrom `benchmarks/results/{target.name}`.")
    target.with_suffix(".md").write_text(table, encoding="utf-8")
    payload: dict[str, Any] = {
        "benchmark": "micro",
        "command": harness.command_line("benchmarks.micro", sys.argv[1:] if arguments is None else arguments),
        "environment": harness.environment(),
        "configuration": {name: value for name, value in vars(options).items() if name != "path"},
        "bounds": [bound.as_dict() for bound in bounds],
        "samples": samples,
    }
    harness.write_results(target, payload)
    return 0 if all(bound.holds for bound in bounds) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--path", help="directory of the spool (default: the temporary directory)")
    parser.add_argument("--rounds", type=int, default=3, help="samples of each kind, taken in turns")
    parser.add_argument("--pairs", type=int, default=31, help="bare and ours in turns, in each sample of the hooks")
    parser.add_argument("--few", type=int, default=FEW, help="tensors alive at once")
    parser.add_argument("--many", type=int, default=MANY, help="tensors alive at once, for the scaling")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, help="bytes of a transfer against fio")
    parser.add_argument("--depth", type=int, default=4, help="transfers at the same time")
    parser.add_argument("--region", type=int, default=512, help="MiB of each engine's file")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each sample of the disk")
    return parser.parse_args(arguments)


def take_hooks(path: str, options: argparse.Namespace) -> Samples:
    """Every kind of tensor, each sample in a process of its own, in turns."""
    nbytes = {"moves": MOVED_BYTES}

    def sample(kind: str) -> harness.Sample:
        return _hook_sample(kind, options.few, 1, options.pairs, path, nbytes.get(kind, 0))

    taken = harness.interleave(list(micro_hooks.KINDS), options.rounds, sample)
    return [one for mine in taken.values() for one in mine]


def take_scaling(path: str, options: argparse.Namespace) -> Samples:
    """Few and many tensors alive at once, in turns; as many chains of few as make about a tenth of many."""
    sizes = {f"{kind} {count}": (kind, count) for kind in SCALED for count in (options.few, options.many)}

    def sample(mode: str) -> harness.Sample:
        kind, count = sizes[mode]
        chains = max(1, options.many // (10 * count))
        return _hook_sample(kind, count, chains, 2, path, SMALL_BYTES)

    taken = harness.interleave(list(sizes), options.rounds, sample)
    return [one for mine in taken.values() for one in mine]


def _hook_sample(kind: str, alive: int, chains: int, pairs: int, path: str, nbytes: int) -> harness.Sample:
    spec = {"kind": kind, "tensors": alive, "chains": chains, "pairs": pairs, "path": path, "nbytes": nbytes}
    result = harness.run_sample("benchmarks.micro_hooks", spec, timeout_s=TIMEOUT_S)
    return _tell({"kind": kind, "alive": alive, "nbytes": nbytes, **result})


def _tell(sample: harness.Sample) -> harness.Sample:
    head = {name: value for name, value in sample.items() if name not in ("pairs", "statistics")}
    print(" ".join(f"{name}={value}" for name, value in head.items()), flush=True)
    return sample


def above_bare_us(samples: Samples, clock: str) -> float | None:
    """Median over all pairs of (ours - bare) for one tensor, in microseconds."""
    costs = [
        (pair["ours"][clock] - pair["bare"][clock]) / sample["tensors"] * 1e6
        for sample in samples
        for pair in sample.get("pairs", ())
    ]
    return median(costs) if costs else None


def judge(samples: dict[str, Samples]) -> list[Bound]:
    """The bounds of what was measured."""
    bounds: list[Bound] = []
    hooks = samples.get("hooks", ())
    for kind, text in micro_hooks.KINDS.items() if hooks else ():
        cost = above_bare_us([s for s in hooks if s["kind"] == kind], "thread_s")
        limit = MOVES_US if kind == "moves" else STAYS_US
        bounds.append(Bound(what=f"hook: {text}", measured=cost, bound=limit, unit=" µs"))
    if "scaling" in samples:
        bounds += [_flatness(kind, [s for s in samples["scaling"] if s["kind"] == kind]) for kind in SCALED]
    return bounds + judge_spool(samples.get("spool", [])) + judge_busy(samples.get("busy", []))


def _flatness(kind: str, samples: Samples) -> Bound:
    few, many = min(s["alive"] for s in samples), max(s["alive"] for s in samples)
    costs = [above_bare_us([s for s in samples if s["alive"] == alive], "thread_s") for alive in (few, many)]
    ratio = costs[1] / costs[0] if costs[0] and costs[1] else None
    what = f"scaling: {micro_hooks.KINDS[kind]}, {many} alive over {few}"
    return Bound(what=what, measured=ratio, bound=FLAT, unit=" ×")


def judge_spool(samples: Samples) -> list[Bound]:
    """Each engine against the faster of fio's on its file; without fio, or without an engine, its rows are left out."""
    bounds = []
    for block in sorted({s["block"] for s in samples if "block" in s}):
        for direction in micro_spool.WAYS:
            for engine in micro_spool.ENGINES:
                rates = rates_of([s for s in samples if s.get("file_of") == engine], block, direction)
                own = rates.pop(engine, None)
                if own is not None and rates:
                    what = f"spool: {engine} {direction}, {block >> 10} KiB, of fio"
                    share = own / max(rates.values())
                    bounds.append(Bound(what=what, measured=share, bound=OF_FIO, at_most=False, unit=" ×"))
    return bounds


def judge_busy(samples: Samples) -> list[Bound]:
    """``uring`` against ``posix`` with the main thread in pure Python."""
    bounds = []
    for direction in micro_spool.WAYS:
        rates = rates_of(samples, micro_spool.BUSY_BLOCK, direction)
        if {"uring", "posix"} <= set(rates):
            ratio = rates["uring"] / rates["posix"]
            what = f"spool: uring {direction}, {micro_spool.BUSY_BLOCK >> 10} KiB, main thread in Python, of posix"
            bounds.append(Bound(what=what, measured=ratio, bound=BUSY_URING, at_most=False, unit=" ×"))
    return bounds


def rates_of(samples: Samples, block: int, direction: str) -> dict[str, float]:
    """Median bytes a second of each mode."""
    rates: dict[str, list[float]] = {}
    for sample in samples:
        if "bytes_per_s" in sample and (sample["block"], sample["direction"]) == (block, direction):
            rates.setdefault(sample["mode"], []).append(sample["bytes_per_s"])
    return {mode: median(values) for mode, values in rates.items()}


def not_measured(samples: dict[str, Samples]) -> list[str]:
    """What is left out, and why."""
    failed = [sample for part in samples.values() for sample in part if "error" in sample]
    return list(dict.fromkeys(f"{s.get('mode') or s.get('kind')}: {s['error']}" for s in failed))


def render(samples: dict[str, Samples], bounds: Sequence[Bound]) -> str:
    """The bounds, what is missing, and what the bounds were made from."""
    parts = [harness.bounds_table(bounds)] if bounds else []
    parts += [f"Not measured: {line}\n" for line in not_measured(samples)]
    hooks = [*samples.get("hooks", ()), *samples.get("scaling", ())]
    if hooks:
        costs = ("a saved tensor, µs above bare hooks", "bytes", "alive", "training thread", "wall clock", "a call, ns")
        parts.append(harness.markdown_table(costs, _hook_rows(hooks)))
    rates = _spool_rows(samples.get("spool", ())) + _spool_rows(samples.get("busy", ()))
    if rates:
        columns = ("GB/s", "block KiB", "at once", "main thread", "write", "read")
        parts.append(harness.markdown_table(columns, rates))
    return "\n".join(parts)


def _hook_rows(samples: Samples) -> list[tuple[str, ...]]:
    rows = []
    for kind, alive, nbytes in dict.fromkeys((s["kind"], s["alive"], s["nbytes"]) for s in samples):
        mine = [s for s in samples if (s["kind"], s["alive"], s["nbytes"]) == (kind, alive, nbytes)]
        costs = (above_bare_us(mine, clock) for clock in ("thread_s", "wall_s"))
        size = str(nbytes) if kind == "moves" else "-"
        calls = [pair["empty_call_s"] for sample in mine for pair in sample.get("pairs", ())]
        numbers = ["-" if cost is None else f"{cost:.2f}" for cost in costs]
        numbers.append(f"{median(calls) * 1e9:.0f}" if calls else "-")
        rows.append((micro_hooks.KINDS[kind], size, str(alive), *numbers))
    return rows


def _spool_rows(samples: Sequence[harness.Sample]) -> list[tuple[str, ...]]:
    rows = []
    timed = [s for s in samples if "bytes_per_s" in s]
    for block, mode, file in dict.fromkeys((s["block"], s["mode"], s.get("file_of", "")) for s in timed):
        mine = [s for s in timed if (s["block"], s["mode"], s.get("file_of", "")) == (block, mode, file)]
        rates = (rates_of(mine, block, way).get(mode) for way in micro_spool.WAYS)
        numbers = ("-" if rate is None else f"{rate / 1e9:.2f}" for rate in rates)
        name = f"{mode}, on the file of {file}" if file and file != mode else mode
        rows.append((name, str(block >> 10), str(mine[0]["depth"]), "Python" if mine[0]["busy"] else "waits", *numbers))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
