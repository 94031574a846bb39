"""A step like that of Llama 3 with 8 billion parameters on the simulated device: time, and the allocator's peak.

    python -m benchmarks.accelerator [--rows NAME ...] [--hosts NAME ...] [--links NAME ...]

In virtual time, as `tests.scaled_llama` says: nothing depends on the machine, and all sizes and times are those of the
full step. With the host ahead of the device, with a host that is the slower one, and with every layer checkpointed, the
last also with the logits and the loss of a vocabulary of 32,000, and in bf16 with LoRA adapters in float32. The
allocator's peak is what PyTorch's own counter says, less what was there before the step. "Driver calls" are those of
the library for events, waits, copies, times and the allocator (`record_stream`) in the last step, without questions
whether a graph is captured. TRL's ``OffloadActivations`` is its own code; its hooks take no time of the host.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

from benchmarks import harness
from benchmarks.harness import Bound, Row
from tests.scaled_llama import LAUNCHES, LAYERS, LINK_BYTES_PER_S, STEPS

GIB = 1 << 30
LIMIT_S = 1200
LATE, HIGH = 1.01, 1.06
"""Times keep's step, and times the plan's peak: what the default may take."""
LATE_BUDGET, HIGH_BUDGET = 1.05, 1.05
"""Times what the link allows, and times the budget with keep's peak above what is saved: what a budget may take."""
TRL = "TRL's OffloadActivations"
AT_TRL = "device_budget, below TRL's peak"
BELOW_TRL = 0.9
"""Share of TRL's peak, less what a step needs beside what is saved, that is the budget of this row."""
MODES: dict[str, dict[str, Any]] = {
    "keep": {"options": None},
    "default": {"options": {"policy": "auto"}},
    "greedy": {"options": {"policy": "greedy"}},
    "device_budget 60 %": {"options": {"device_budget": 0.6}},
    "device_budget 35 %": {"options": {"device_budget": 0.35}},
    "all": {"options": {"policy": "all"}},
    TRL: {"options": None, "seam": "trl", "steps": 3},
    AT_TRL: {"options": {"device_budget": 0.0}},
}
CHECKPOINTED = "checkpointed"
SHAPES: dict[str, dict[str, Any]] = {
    CHECKPOINTED: {},
    "checkpointed, with logits and loss": {"head": True},
    "checkpointed, LoRA": {"lora": True, "bf16": True},
}
HOST, NVME, NO_USE = "host, 52 GB/s", "NVMe, 12/24 GB/s", "0.2 GB/s"
LINKS = {HOST: (52e9, 52e9), NVME: (12e9, 24e9), NO_USE: (0.2e9, 0.2e9)}
"""Bytes per second to the host and to the device. A disk behind page-locked memory is a link of its speed here."""
CHECKPOINTED_STEPS = 16
ROOMS = (1.0, 1.05, 1.50)
"""``device_memory``, times the allocator's peak of checkpointing alone; the first is nothing but the default."""
SHORTER = {(HOST, 1.05): 0.94, (HOST, 1.50): 0.91, (NVME, 1.05): 0.985, (NVME, 1.50): 0.985}
NO_SHORTER = 1.01
"""Times checkpointing's step: at most. Its peak is never above ``device_memory``, the first step included."""
Rows = dict[str, Row]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write the result file; return 1 where a bound does not hold."""
    parser, hosts = harness.make_parser(__doc__), [*LAUNCHES, *SHAPES]
    parser.add_argument("--rows", nargs="+", choices=list(MODES), default=list(MODES), help="only these, and keep")
    parser.add_argument("--hosts", nargs="+", choices=hosts, default=hosts, help="only these")
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS), help="checkpointed: only these")
    options = parser.parse_args(arguments)
    configuration = {"launch_s": LAUNCHES, "layers": LAYERS, "steps": STEPS, "modes": MODES, "links": LINKS}
    variant = CHECKPOINTED if set(options.hosts) <= set(SHAPES) else ""
    results = harness.Results("accelerator", arguments, configuration, variant=variant)
    rows: dict[str, Rows] = {host: {} for host in options.hosts}
    bounds = []
    for host, found in rows.items():
        take = partial(_take, results, rows, host)
        if host in LAUNCHES:
            bounds += _modes(host, found, take, options)
        else:
            bounds += _checkpointed(partial(take, **SHAPES[host]), options, SHORTER if host == CHECKPOINTED else {})
    tables = [harness.table_of(host, found, COLUMNS) for host, found in rows.items()]
    failed = [row for found in rows.values() for row in found.values() if "error" in row]
    return 0 if results.finish("\n".join(tables), bounds) and not failed else 1


def _take(results: harness.Results, rows: dict[str, Rows], host: str, name: str, **spec: Any) -> Row:
    launch_s = LAUNCHES.get(host, LAUNCHES["host ahead"])
    spec = {"options": None, "launch_s": launch_s} | spec
    rows[host][name] = row = harness.run_sample("tests.scaled_llama", spec, timeout_s=LIMIT_S)
    print(f"{host}, {name}: {row.get('error', 'done')}", flush=True)
    results.write(rows=rows)
    return row


def _modes(host: str, found: Rows, take: Callable[..., Row], options: argparse.Namespace) -> list[Bound]:
    """Every mode with one host; what must hold of them."""
    for name, spec in MODES.items():
        if name != "keep" and name not in options.rows:
            continue
        if name == AT_TRL:
            if "peak_bytes" not in found.get(TRL, {}) or "saved_bytes" not in found.get("default", {}):
                continue
            budget_bytes = BELOW_TRL * (found[TRL]["peak_bytes"] - _above_saved(found))
            spec = {"options": {"device_budget": int(budget_bytes)}}
        take(name, **spec)
    return _bounds(host, found)


def _checkpointed(
    take: Callable[..., Row], options: argparse.Namespace, shorter: dict[tuple[str, float], float]
) -> list[Bound]:
    """Every layer checkpointed, at the peak of checkpointing alone and above; what must hold."""
    take("keep")
    alone = take("checkpointing", checkpointed=True)
    bounds = []
    for link, room in product(options.links, ROOMS):
        limit = room * alone["peak_bytes"]
        what = f"{link}, {f'+ {100 * room - 100:.0f} %' if room > 1 else 'default'}"
        given = {"device_memory": int(limit)} if room > 1 else {}
        row = take(what, options=given, link=LINKS[link], steps=CHECKPOINTED_STEPS, checkpointed=True)
        step, peak = (None, None) if "error" in row else (row["step_s"] / alone["step_s"], row["highest_bytes"] / limit)
        bounds.append(Bound(f"{what}: step × checkpointing's", step, shorter.get((link, room), NO_SHORTER)))
        bounds.append(Bound(f"{what}: highest peak × its limit", peak, 1.0))
    return bounds


def _above_saved(found: Rows) -> float:
    """How far keep's peak is above what is saved: what a step needs beside that."""
    return float(found["keep"]["peak_bytes"] - found["default"]["saved_bytes"])


def _bounds(host: str, found: Rows) -> list[Bound]:
    """What must hold of one table."""
    rows = {name: row for name, row in found.items() if "error" not in row}
    keep, default, trl, at_trl = (rows.get(name) for name in ("keep", "default", TRL, AT_TRL))
    bounds = []

    def bound(what: str, measured: float, limit: float) -> None:
        bounds.append(Bound(f"{host}: {what}", measured, limit))

    if keep is None or default is None:
        return []
    bound("default's step × keep's", default["step_s"] / keep["step_s"], LATE)
    if default["predicted_peak_bytes"]:
        bound("default's peak × its plan's", default["peak_bytes"] / default["predicted_peak_bytes"], HIGH)
    for name, row in rows.items():
        share = (MODES[name]["options"] or {}).get("device_budget")
        if not share:
            continue
        budget_bytes = share * row["saved_bytes"]
        bound(f"{name}: step × what the link allows", row["step_s"] / _least_s(keep, row, budget_bytes), LATE_BUDGET)
        allowed_bytes = budget_bytes + _above_saved(rows)
        bound(f"{name}: peak × budget and what a step needs beside", row["peak_bytes"] / allowed_bytes, HIGH_BUDGET)
    if trl is not None and at_trl is not None:
        bound("step below TRL's peak × TRL's", at_trl["step_s"] / trl["step_s"], 1.0)
        bound("peak there × TRL's", at_trl["peak_bytes"] / trl["peak_bytes"], 1.0)
    return bounds


def _least_s(keep: Row, row: Row, budget_bytes: float) -> float:
    """The step by the arithmetic of the link: what does not fit leaves in the forward and comes back in backward."""
    copies_s = (row["saved_bytes"] - budget_bytes) / LINK_BYTES_PER_S
    forward_s, backward_s = keep["forward_s"], keep["step_s"] - keep["forward_s"]
    return float(max(forward_s, copies_s) + max(backward_s, copies_s))


COLUMNS = {
    "step, ms": harness.number("step_s", 1e-3, 0),
    "allocator's peak, GiB": harness.number("peak_bytes", GIB, 2),
    "highest of any step, GiB": harness.number("highest_bytes", GIB, 2),
    "plan's peak, GiB": harness.number("predicted_peak_bytes", GIB, 2),
    "moved, GiB": harness.number("moved_bytes", GIB, 1),
    "waited, ms": harness.number("waited_s", 1e-3, 0),
    "held after backward, GiB": harness.number("held_bytes", GIB, 1),
    "driver calls": harness.number("driver_calls", 1, 0),
    "run once": harness.number("once", 1, 0),
}

if __name__ == "__main__":
    raise SystemExit(main())
