"""Whole training steps on the CPU, in turns: everything kept, the defaults, peers, a trace, and checkpoints.

    python -m benchmarks.steps_cpu --part e2e|peers|trace|checkpointing [--rounds N] [--cases NAME ...] [--tiny]

Two threads, AdamW, float32.

``e2e``: GPT (also with twice its layers and twice its sequence), BERT, T5 and ViT with the defaults. Everything is kept
twice: as PyTorch does, in memory of the C library, which gives large blocks back and faults them in again; and with the
library's hooks and allocator and nothing moved. The step against the first is what a user sees, against the second
what moving costs. ``peers``: the same GPT with the hooks of PyTorch's tutorial (``torch.save``), with ``save_on_cpu``,
which copies nothing on CPU tensors and so shows how far the same work lies apart, and with every block recomputed.
``trace``: what a trace costs; no plan is made, so that both move the same. ``checkpointing``: models with their own
flag on, alone and with ``attach(model, target="nvme")``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from benchmarks import harness
from benchmarks.harness import Bound, Row, Sample, Samples, mib, middle, number
from benchmarks.modes import MODES, WARM_UP
from benchmarks.workloads import THREADS, TINY, gpt

LIMIT_S = 1200.0
"""Seconds for what a worker does before its first step, and for each step."""
COUNTED = ("system_s", "page_faults", "written_bytes", "read_bytes", "wait_s")
Rows = dict[str, Row]
Specs = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is measured together.

    Attributes:
        cases: what is trained, by name, for `benchmarks.workloads.build`.
        modes: what `benchmarks.worker` is told of each mode; the modes of a case take their steps in turns.
        references: by the key of a ratio, the mode that steps are compared with; the first also for memory and bits.
        shown: the modes that have a row.
        bounds: what must hold of the rows, which are named "case, mode".
        untimed: steps before those that are timed.
        rounds: samples of each.
        steps: timed steps of each sample.
    """

    cases: Specs
    modes: Specs
    references: Mapping[str, str]
    shown: Sequence[str]
    bounds: Callable[[Rows], list[Bound]]
    untimed: int = WARM_UP
    rounds: int = 3
    steps: int = 4


# -- what is compared -------------------------------------------------------------------------------------------------


def compare(taken: Sequence[Sample], references: Mapping[str, Sequence[Sample]]) -> Row:
    """The medians of one mode, and its ratios to each reference. Bytes and seconds."""
    first = next(iter(references.values()))
    rss, kept_rss = middle(taken, "peak_rss_bytes"), middle(first, "peak_rss_bytes")
    row: Row = {
        "step_s": middle(taken, "median_step_s"),
        "peak_rss_bytes": rss,
        "reference_rss_bytes": kept_rss,
        "above_static_bytes": rss - middle(taken, "static_rss_bytes"),
        "others_cpu_share": max(sample["others_cpu_share"] for sample in (*taken, *first)),
        "identical": harness.identical(taken, *references.values()),
        "cpu_ratio": median(a["cpu_s_per_step"] / b["cpu_s_per_step"] for a, b in zip(taken, first, strict=True)),
    }
    row |= {f"{key}_of_rounds": harness.ratios(taken, others) for key, others in references.items()}
    row |= {key: median(row[f"{key}_of_rounds"]) for key in references}
    row |= {f"{name}_per_step": middle(taken, f"{name}_per_step") for name in COUNTED if f"{name}_per_step" in taken[0]}
    if "statistics" in taken[0]:
        saved, resident = (middle(taken, "statistics", f"{name}_peak_bytes") for name in ("baseline", "resident"))
        row |= {"baseline_peak_bytes": saved, "resident_peak_bytes": resident, "resident_share": resident / saved}
        row["gone_share"] = (kept_rss - rss) / saved
    return row


def rows_of(part: Part, samples: Samples) -> Rows:
    """A row for each case and mode that is shown; a text under ``why`` for one that was not measured."""
    rows: Rows = {}
    for case in dict.fromkeys(name.rpartition("/")[0] for name in samples):
        by_mode = {mode: samples[f"{case}/{mode}"] for mode in part.modes if f"{case}/{mode}" in samples}
        errors = {mode: [one["error"] for one in taken if "error" in one] for mode, taken in by_mode.items()}
        fine = {mode: taken for mode, taken in by_mode.items() if not errors[mode]}
        references = {key: fine[mode] for key, mode in part.references.items() if mode in fine}
        for mode in part.shown:
            name = case if len(part.shown) == 1 else f"{case}, {mode}"
            if mode in fine and next(iter(part.references)) in references:
                rows[name] = compare(fine[mode], references)
            elif mode in by_mode:
                rows[name] = {"why": next(iter(errors[mode]), "no reference")}
    return rows


# -- the parts --------------------------------------------------------------------------------------------------------

KEEP, SAME_MEMORY, DEFAULT = "keep", "keep, same memory", "default"
HEAD, GROWN = "gpt", ("gpt, layers × 2", "gpt, sequence × 2")
RATIO_BOUNDS = {"ratio": 1.10, "moving": 1.05}
GONE_BOUND, GROWTH_BOUND = 0.60, 0.05
VISION = {"hidden": 384, "layers": 8, "image": 224, "patch": 16, "classes": 100}


def models(tiny: bool) -> Specs:
    layers, width, sequence, batch = (2, 64, 64, 2) if tiny else (8, 512, 512, 8)
    language = {"hidden": 384, "layers": 6, "seq": 256, "vocab": 1024}
    vision = VISION
    if tiny:
        language = {"hidden": 64, "layers": 2, "seq": 32, "vocab": 64}
        vision = {"hidden": 64, "layers": 2, "image": 32, "patch": 8, "classes": 10}
    return {
        HEAD: gpt(layers, width, sequence, batch=batch),
        GROWN[0]: gpt(2 * layers, width, sequence, batch=batch),
        GROWN[1]: gpt(layers, width, 2 * sequence, batch=batch),
        **{name: {"model": name, "batch": 2 * batch, "sizes": language} for name in ("bert", "t5")},
        "vit": {"model": "vit", "batch": 2 * batch, "sizes": vision},
    }


def e2e_bounds(rows: Rows) -> list[Bound]:
    """What must hold of the GPTs, as far as they were measured."""
    if "ratio" not in rows.get(HEAD, {}):
        return []
    head = rows[HEAD]
    found = [Bound("gpt: saved bytes gone from peak RSS", head["gone_share"], GONE_BOUND, at_most=False)]
    for key, reference in (("ratio", "keep's"), ("moving", "keep's in the same memory")):
        what = f"step time / {reference}"
        found.append(Bound(f"gpt: {what}", head[key], RATIO_BOUNDS[key], unit=" ×"))
        for case in GROWN:
            if key in rows.get(case, {}):
                change = abs(rows[case][key] - head[key])
                found.append(Bound(f"{case}: change of the {what}", change, GROWTH_BOUND))
    return found


def e2e(tiny: bool, folder: str) -> Part:
    return Part(
        cases=models(tiny),
        modes={mode: {"mode": mode} for mode in (KEEP, SAME_MEMORY, DEFAULT)},
        references={"ratio": KEEP, "moving": SAME_MEMORY},
        shown=(DEFAULT,),
        bounds=e2e_bounds,
    )


PEERS = (KEEP, DEFAULT, "torch.save", "all", "recompute", "save_on_cpu")
"""In the order of their turns: those that are compared with each other follow each other."""
TORCH_SAVE_BOUND = 1.8


def peers_bounds(rows: Rows) -> list[Bound]:
    measured = rows.get(f"{HEAD}, torch.save", {}).get("to_ours")
    what = "step time of torch.save hooks / ours"
    return [] if measured is None else [Bound(what, measured, TORCH_SAVE_BOUND, at_most=False)]


def peers(tiny: bool, folder: str) -> Part:
    return Part(
        cases={HEAD: models(tiny)[HEAD]},
        modes={mode: {"mode": mode} for mode in PEERS},
        references={"ratio": KEEP, "to_ours": DEFAULT},
        shown=PEERS,
        bounds=peers_bounds,
    )


def trace(tiny: bool, folder: str) -> Part:
    options: dict[str, Any] = {"policy": "greedy", "min_bytes": 0 if tiny else None}
    traced = options | {"trace": os.path.join(folder, "trace.json")}
    return Part(
        cases={"large": gpt(8, 512, 512), "small": gpt(4, 128, 128)} if not tiny else {"tiny": TINY},
        modes={"off": {"mode": "nvme", "options": options}, "on": {"mode": "nvme", "options": traced}},
        references={"ratio": "off"},
        shown=("on",),
        bounds=lambda rows: [
            Bound(f"{case}: step time", row.get("ratio"), 1.02, unit=" ×") for case, row in rows.items()
        ],
        steps=8,
    )


ALONE, COUNTING, OURS, SLOW = "checkpointing", "counting", "attached", "attached, 60 MB/s"
LANGUAGE = {"hidden": 384, "layers": 8, "seq": 512, "vocab": 2048}
LLAMA = LANGUAGE | {"inner": 1024, "heads": 6, "kv_heads": 3}
CHECKPOINTED: Specs = {
    "llama": {"model": "llama", "batch": 4, "sizes": LLAMA},
    "gpt2": {"model": "gpt2", "batch": 4, "sizes": LANGUAGE},
    "vit": {"model": "vit", "batch": 16, "sizes": VISION},
    "t5": {"model": "t5", "batch": 8, "sizes": LANGUAGE | {"seq": 256}},
    "unet": {"model": "unet", "batch": 4, "sizes": {"channels": 128, "image": 32, "text": 32}},
}
STEP_BOUNDS, SAVED_BOUND = {OURS: 0.90, SLOW: 1.00}, 1.02
"""Times checkpointing's step, and times its peak of saved bytes."""


def checkpointing_bounds(rows: Rows) -> list[Bound]:
    """What must hold of those that were measured; without the count, none of them keeps the bound on saved bytes."""
    found = []
    for case, (mode, most) in product(CHECKPOINTED, STEP_BOUNDS.items()):
        row, counted = rows.get(f"{case}, {mode}", {}), rows.get(f"{case}, {COUNTING}", {})
        if "ratio" in row:
            saved = row["resident_peak_bytes"] / counted["resident_peak_bytes"] if "ratio" in counted else None
            process = row["peak_rss_bytes"] / row["reference_rss_bytes"]
            found.append(Bound(f"{case}, {mode}: step × checkpointing's", row["ratio"], most, unit=" ×"))
            found.append(Bound(f"{case}, {mode}: peak of saved bytes × its", saved, SAVED_BOUND, unit=" ×"))
            found.append(Bound(f"{case}, {mode}: process's peak × its", process, 1.0, unit=" ×"))
    return found


def checkpointing(tiny: bool, folder: str) -> Part:
    return Part(
        cases={name: case | {"checkpointing": True} for name, case in CHECKPOINTED.items()},
        modes={
            ALONE: {"mode": KEEP},
            COUNTING: {"mode": "attached, kept"},
            OURS: {"mode": "attached"},
            SLOW: {"mode": "attached", "options": {"disk_bytes_per_s": 60e6}},
        },
        references={"ratio": ALONE},
        shown=(COUNTING, OURS, SLOW),
        bounds=checkpointing_bounds,
        untimed=10,  # within so many the plan is at its best
        rounds=1,
        steps=6,
    )


PARTS: dict[str, Callable[[bool, str], Part]]
PARTS = {"e2e": e2e, "peers": peers, "trace": trace, "checkpointing": checkpointing}

# -- one run ----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result files; 1 when something failed, differs in a bit or does not hold."""
    parser = harness.make_parser(__doc__, tiny=True)
    parser.add_argument("--part", choices=list(PARTS), default="e2e")
    parser.add_argument("--rounds", type=int, help="samples of each kind")
    parser.add_argument("--steps", type=int, help="timed steps of each sample")
    parser.add_argument("--cases", nargs="+", help="only these")
    parser.add_argument("--modes", nargs="+", help="only these, and those that others are compared with")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return run(PARTS[options.part](options.tiny, folder), options, arguments)


def run(part: Part, options: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    common = {"threads": THREADS, "device": "cpu", "dtype": "float32", "optimizer": True, "path": options.path}
    common |= {"steps": options.steps or part.steps, "warm_up": part.untimed}
    common |= {"options": {"min_bytes": 0} if options.tiny else {}}
    modes = {
        name: mode
        for name, mode in part.modes.items()
        if name in (options.modes or part.modes) or name in part.references.values()
    }
    groups = [
        {f"{case}/{name}": common | part.cases[case] | mode for name, mode in modes.items()}
        for case in options.cases or part.cases
    ]
    configuration = common | {"cases": part.cases, "modes": {name: str(mode) for name, mode in modes.items()}}
    results = harness.Results("steps_cpu", arguments, configuration, variant=options.part, keep=not options.tiny)
    samples = harness.take_rounds(
        groups, options.rounds or part.rounds, limit_s=LIMIT_S, after_round=lambda taken: results.write(samples=taken)
    )
    rows = rows_of(part, samples)
    hold = results.finish(render(part, rows), part.bounds(rows), summary=rows)
    failed = [name for name, taken in samples.items() if any("error" in sample for sample in taken)]
    differ = [name for name, row in rows.items() if row.get("identical") is False and not _of_a_peer(part, name)]
    print(f"failed: {failed}, differ: {differ}")
    return 0 if not failed and not differ and (hold or options.tiny) else 1


def _of_a_peer(part: Part, name: str) -> bool:
    """Whether a row is of a mode that is not the library's: that it computes other bits is its own affair."""
    mode = name.rpartition(", ")[2]
    return mode in part.modes and not MODES[part.modes[mode]["mode"]].ours


def render(part: Part, rows: Rows) -> str:
    """The rows as a Markdown table, and why others are missing."""
    columns: dict[str, Callable[[Row], object]] = {
        **{f"step / {mode}": partial(_spread, f"{key}_of_rounds") for key, mode in part.references.items()},
        "step, s": number("step_s", 1, 3),
        "processor time": number("cpu_ratio", 1, 3),
        "system time, s": number("system_s_per_step", 1, 2),
        "page faults": lambda row: f"{row['page_faults_per_step']:,.0f}",
        "saved": lambda row: mib(row.get("baseline_peak_bytes")),
        "resident peak": lambda row: mib(row.get("resident_peak_bytes")),
        "peak RSS": lambda row: mib(row["peak_rss_bytes"]),
        "above static": lambda row: mib(row["above_static_bytes"]),
        "saved bytes gone": lambda row: None if "gone_share" not in row else f"{row['gone_share']:.0%}",
        "written a step": lambda row: mib(row.get("written_bytes_per_step")),
        "waits a step, s": number("wait_s_per_step", 1, 3),
        "bit-identical": lambda row: harness.yes(row["identical"]),
    }
    measured = {name: row for name, row in rows.items() if "why" not in row}
    absent = [f"\nNot measured: {name}: {row['why']}\n" for name, row in rows.items() if "why" in row]
    return harness.table_of("two threads", measured, columns) + "".join(absent)


def _spread(key: str, row: Row) -> str | None:
    if key not in row:
        return None
    text = f"{median(row[key]):.3f}"
    return text if len(row[key]) == 1 else f"{text} ({min(row[key]):.2f} to {max(row[key]):.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
