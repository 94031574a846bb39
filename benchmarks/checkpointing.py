"""Programs that checkpoint: what the library adds to ``torch.utils.checkpoint``, in time and memory.

    python -m benchmarks.checkpointing [--parts cpu simulated memory] [--cases NAME ...] [--rounds N] [--path DIR]

``cpu``: real steps, checkpointing alone and ``attach(model, target="nvme")`` on top of it, in turns. ``simulated``: the
Llama of `tests.scaled_llama` in virtual time, with every layer checkpointed, without and with regions that run again in
part (``checkpoints="selective"``). ``memory``: small models on the simulated device with a part of the memory that
keeping everything takes (`tests.limited_memory`).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import checkpointing_memory, harness, turns
from benchmarks.harness import Bound, Row, Samples, middle
from benchmarks.whole_steps import THREADS, identical
from tests import scaled_llama

GIB = 1 << 30
LIMIT_S = 1200.0
UNTIMED = 10
"""Steps before those that are timed: within so many the plan is at its best."""

# -- real steps on the CPU --------------------------------------------------------------------------------------------

ALONE, OURS, SLOW = "checkpointing", "attached", "attached, 60 MB/s"
SLOW_DISK_BYTES_PER_S = 60e6
MODES: dict[str, dict[str, Any]] = {
    ALONE: {"mode": "keep"},
    OURS: {"mode": "attached"},
    SLOW: {"mode": "attached", "options": {"disk_bytes_per_s": SLOW_DISK_BYTES_PER_S}},
}
STEP_BOUNDS = {OURS: 0.90, SLOW: 1.00}
"""Times checkpointing's step."""
SAVED_BOUND, PROCESS_BOUND = 1.02, 1.00
"""Times checkpointing's peak of saved bytes, and of the process."""
LANGUAGE = {"hidden": 384, "layers": 8, "seq": 512, "vocab": 2048}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model": "llama", "batch": 4, "sizes": LANGUAGE | {"inner": 1024, "heads": 6, "kv_heads": 3}},
    "gpt2": {"model": "gpt2", "batch": 4, "sizes": LANGUAGE},
    "vit": {
        "model": "vit",
        "batch": 16,
        "sizes": {"hidden": 384, "layers": 8, "image": 224, "patch": 16, "classes": 100},
    },
    "t5": {"model": "t5", "batch": 8, "sizes": LANGUAGE | {"seq": 256}},
    "unet": {"model": "unet", "batch": 4, "sizes": {"channels": 128, "image": 32, "text": 32}},
}


def cpu(options: argparse.Namespace, results: harness.Results) -> tuple[str, list[Bound]]:
    """Take the steps; return the table and the bounds."""
    common = {"device": "cpu", "dtype": "float32", "threads": THREADS, "optimizer": True, "checkpointing": True}
    common |= {"warm_up": UNTIMED, "steps": options.steps, "path": options.path}
    modes = {name: spec for name, spec in MODES.items() if name == ALONE or name in options.modes}
    groups = [
        {f"{case}, {mode}": common | CASES[case] | spec for mode, spec in modes.items()} for case in options.cases
    ]
    samples = turns.take_rounds(
        groups, options.rounds, limit_s=LIMIT_S, after_round=lambda taken: results.write(cpu=taken)
    )
    counted: Samples = {}
    for case in options.cases:  # what checkpointing saves at most, its recomputations included
        spec = common | CASES[case] | {"mode": "attached, kept", "warm_up": 1, "steps": 1}
        counted[case] = [harness.run_sample("benchmarks.worker", spec, timeout_s=LIMIT_S)]
    results.write(cpu_counted=counted)
    rows: dict[str, Row] = {}
    bounds: list[Bound] = []
    for case in options.cases:
        taken = {mode: samples[f"{case}, {mode}"] for mode in modes}
        failed = [
            sample["error"] for of_mode in (*taken.values(), counted[case]) for sample in of_mode if "error" in sample
        ]
        if failed:
            print(f"{case} failed: {failed[0]}")
            bounds.append(Bound(what=f"{case}: ran", measured=None, bound=1.0))
            continue
        saved = middle(counted[case], "statistics", "resident_peak_bytes")
        for mode, of_mode in taken.items():
            row: Row = {
                "step_s": middle(of_mode, "median_step_s"),
                "ratio": middle([{"r": ratio} for ratio in turns.ratios(of_mode, taken[ALONE])], "r"),
                "ratios": turns.spread(turns.ratios(of_mode, taken[ALONE])),
                "saved_bytes": saved if mode == ALONE else middle(of_mode, "statistics", "resident_peak_bytes"),
                "process_bytes": middle(of_mode, "peak_rss_bytes"),
                "identical": identical(of_mode, taken[ALONE]),
            }
            rows[f"{case}, {mode}"] = row
            if mode == ALONE:
                continue
            process = row["process_bytes"] / middle(taken[ALONE], "peak_rss_bytes")
            bounds += [
                Bound(what=f"{case}, {mode}: step × checkpointing's", measured=row["ratio"], bound=STEP_BOUNDS[mode]),
                Bound(
                    what=f"{case}, {mode}: peak of saved bytes × its",
                    measured=row["saved_bytes"] / saved,
                    bound=SAVED_BOUND,
                ),
                Bound(what=f"{case}, {mode}: process's peak × its", measured=process, bound=PROCESS_BOUND),
                Bound(
                    what=f"{case}, {mode}: losses and gradients differ",
                    measured=float(not row["identical"]),
                    bound=0.0,
                ),
            ]
    results.write(cpu_rows=rows)
    return harness.table_of("CPU, in turns", rows, CPU_COLUMNS), bounds


CPU_COLUMNS: dict[str, Callable[[Row], object]] = {
    "step": lambda row: f"{row['step_s']:.2f} s",
    "× checkpointing": lambda row: row["ratios"],
    "peak of saved bytes": lambda row: harness.mib(row["saved_bytes"]),
    "process's peak": lambda row: harness.mib(row["process_bytes"]),
    "same bits": lambda row: harness.yes(row["identical"]),
}

# -- a Llama on the simulated device ----------------------------------------------------------------------------------

HOST, NVME, NO_USE = "host, 52 GB/s", "NVMe, 12/24 GB/s", "0.2 GB/s"
LINKS = {HOST: (52e9, 52e9), NVME: (12e9, 24e9), NO_USE: (0.2e9, 0.2e9)}
"""Bytes per second to the host and to the device. A disk behind page-locked memory is a link of its speed here."""
PLAN, SELECTIVE = "plan", "selective"
"""Values of ``checkpoints``: regions run again or once, or also again in part."""
LLAMA_STEPS = 16
ROOMS = (1.05, 1.50)
"""``device_memory``, times the allocator's peak of checkpointing alone; both without what is there before a step."""
SHORTER: dict[tuple[str, str, float], float] = {
    **{(PLAN, HOST, 1.05): 0.94, (PLAN, HOST, 1.50): 0.91, (PLAN, NVME, 1.05): 0.985, (PLAN, NVME, 1.50): 0.985},
    **{(SELECTIVE, HOST, 1.00): 0.94, (SELECTIVE, HOST, 1.05): 0.90, (SELECTIVE, HOST, 1.50): 0.91},
    **{(SELECTIVE, NVME, 1.00): 0.985, (SELECTIVE, NVME, 1.05): 0.985, (SELECTIVE, NVME, 1.50): 0.985},
}
"""Times checkpointing's step: at most; 1.01 elsewhere."""
MEMORY_BOUND = 1.0
"""Times ``device_memory``: the allocator's peak of any step, the first one included."""


def simulated(options: argparse.Namespace, results: harness.Results) -> tuple[str, list[Bound]]:
    """Take the steps; return the table and the bounds."""
    launch_s = scaled_llama.LAUNCHES["host ahead"]
    rows: dict[str, Row] = {}
    bounds: list[Bound] = []

    def sample(name: str, **spec: Any) -> Row:
        spec = {"options": None, "launch_s": launch_s, "checkpointed": True} | spec
        rows[name] = harness.run_sample("tests.scaled_llama", spec, timeout_s=LIMIT_S)
        print(f"{name}: {rows[name].get('error', 'done')}", flush=True)
        results.write(simulated=rows)
        return rows[name]

    sample("keep", checkpointed=False)
    alone = sample("checkpointing")
    for link, choice in itertools.product(options.links, options.checkpoints):
        # Nothing but the default: never more memory than checkpointing takes, never slower.
        for room in (1.0, *ROOMS):
            what = f"{link}, {'default' if room == 1 else f'+ {100 * room - 100:.0f} %'}"
            what += ", selective" if choice == SELECTIVE else ""
            given = {"checkpoints": choice} if choice == SELECTIVE else {}
            given |= {"device_memory": int(room * alone["peak_bytes"])} if room > 1 else {}
            row = sample(what, options=given, link=LINKS[link], steps=LLAMA_STEPS)
            failed = "error" in row
            step = None if failed else row["step_s"] / alone["step_s"]
            peak = None if failed else row["highest_bytes"] / (room * alone["peak_bytes"])
            bound = SHORTER.get((choice, link, room), 1.01)
            bounds.append(Bound(what=f"{what}: step × checkpointing's", measured=step, bound=bound))
            bounds.append(Bound(what=f"{what}: highest peak × its limit", measured=peak, bound=MEMORY_BOUND))
    return harness.table_of("Llama, every layer checkpointed", rows, LLAMA_COLUMNS), bounds


def _number(key: str, unit: float, digits: int) -> Callable[[Row], object]:
    return lambda row: None if row.get(key) is None else f"{row[key] / unit:.{digits}f}"


LLAMA_COLUMNS: dict[str, Callable[[Row], object]] = {
    "step, ms": _number("step_s", 1e-3, 0),
    "allocator's peak, GiB": _number("peak_bytes", GIB, 2),
    "highest of any step, GiB": _number("highest_bytes", GIB, 2),
    "plan's peak of saved bytes, GiB": _number("predicted_peak_bytes", GIB, 2),
    "moved, GiB": _number("moved_bytes", GIB, 1),
    "waited, ms": _number("waited_s", 1e-3, 0),
    "run once": lambda row: row.get("once"),
    "again in part": lambda row: row.get("in_part"),
}

# -- all parts --------------------------------------------------------------------------------------------------------

PARTS = {"cpu": cpu, "simulated": simulated, "memory": checkpointing_memory.memory}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write the result file; return 1 where a bound does not hold."""
    parser = harness.make_parser(__doc__, rounds=1)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="only these")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="cpu: only these")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="cpu: only these")
    parser.add_argument("--steps", type=int, default=6, help="cpu: timed steps of each sample")
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS), help="simulated: only these")
    choices = [PLAN, SELECTIVE]
    parser.add_argument("--checkpoints", nargs="+", choices=choices, default=choices, help="simulated: only these")
    checkpointing_memory.add_arguments(parser)
    options = parser.parse_args(arguments)
    configuration = {"cases": CASES, "modes": MODES, "links": LINKS, "untimed": UNTIMED, "threads": THREADS}
    variant = "_".join([*options.parts, *([SELECTIVE] if options.checkpoints == [SELECTIVE] else [])])
    results = harness.Results("checkpointing", arguments, configuration, variant=variant)
    tables, bounds = [], []
    for part in options.parts:
        table, found = PARTS[part](options, results)
        tables.append(table)
        bounds += found
    return 0 if results.finish("\n".join(tables), bounds) else 1


if __name__ == "__main__":
    raise SystemExit(main())
