"""Small models on a simulated device with a part of the memory that keeping all takes (`tests.limited_memory`).

    python -m benchmarks.limited_memory [--models NAME ...] [--shares SHARE ...] [--targets NAME ...] [--known FILE]

Beside the best mix of kept and checkpointed blocks that a person could set by hand. Times are virtual.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Bound, Row
from tests.limited_memory import ACCUMULATION, MODELS, SHAPES

LIMIT_S = 1500.0
SHARES = (0.30, 0.50, 0.70, 0.85)
LINKS = {"52 GB/s": (52e9, 52e9), "12/24 GB/s": (12e9, 24e9)}
"""Bytes per second to the host and to the device: a link, and page-locked memory with a disk's speed behind it."""
STEPS = 60
SETTLED = 10 * len(SHAPES)
"""Steps after which each shape has had ten."""
NEAR, PREDICTED = 1.05, 0.04
"""Times the best mix's step; how far the plan's peak may be from what is measured."""
TARGETS: dict[str, dict[str, Any]] = {
    "host": {"target": "host"},
    "NVMe": {"target": "nvme", "engine": "memory"},
    "host, recompute": {"target": "host", "recompute": True},
}
"""On a target that is a disk only memory counts: its time is real, all other times are virtual."""
Rows = dict[Any, Row]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in limited memory and try all mixes, print, write the result file; 1 where a bound does not hold."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="only these")
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="of keep's peak")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS), help="only these")
    parser.add_argument("--rates", nargs="+", choices=list(LINKS), default=list(LINKS), help="only these links")
    parser.add_argument("--known", type=Path, help="a result whose mixes say which ones to try again")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args(arguments)
    results = harness.Results("limited_memory", arguments, {"links": LINKS, "steps": STEPS, "targets": TARGETS})
    found, by_hand, checkpointed, inside = _take(options)
    results.write(
        memory={str(key): row for key, row in found.items()},
        mixes={str(key): r for key, r in by_hand.items()},
        within={str(key): r for key, r in inside.items()},
    )
    rows = {}
    bounds: list[Bound] = []
    for (model, link, target, share), row in found.items():
        name = f"{model}, {target}, {link}, {share:.0%}"
        rows[name] = judged = _judge(
            row,
            by_hand[model, link],
            checkpointed[model, link],
            inside.get((model, link, share), {"error": "no mixes"}),
        )
        bounds += _bounds(name, judged, timed=target != "NVMe")
    results.write(memory_rows=rows)
    table = harness.table_of(f"{ACCUMULATION} micro-batches, shapes in turns", rows, COLUMNS)
    return 0 if results.finish(table, bounds) else 1


def _take(options: argparse.Namespace) -> tuple[Rows, Rows, Rows, Rows]:
    """Return what ended in limited memory, all mixes, checkpoints alone, and the mixes that fit, by what was asked."""
    pairs = [(model, link) for model in options.models for link in options.rates]
    mixes: list[dict[str, Any]] = [{"what": "mixes", "name": model, "link": LINKS[link]} for model, link in pairs]
    alone: list[dict[str, Any]] = [spec | {"what": "alone", "steps": STEPS} for spec in mixes]
    wanted = [
        (model, link, target, share)
        for model, link in pairs
        for target in options.targets
        for share in options.shares
        if target != "NVMe" or link == options.rates[0]
    ]
    limited = [
        {"what": "limited", "name": model, "link": LINKS[link], "share": share, "steps": STEPS} | TARGETS[target]
        for model, link, target, share in wanted
    ]

    def sample(spec: dict[str, Any]) -> Row:
        found: Row = harness.run_sample("tests.limited_memory", spec, timeout_s=LIMIT_S)
        said = found.get("error") or found.get("failed") or "done"
        print({name: value for name, value in spec.items() if name not in ("steps", "by_hand")}, said, flush=True)
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        known = {} if options.known is None else json.loads(options.known.read_text())["mixes"]
        by_hand = {pair: known[str(pair)] for pair in pairs if str(pair) in known}
        new = [spec for pair, spec in zip(pairs, mixes, strict=True) if pair not in by_hand]
        by_hand |= zip([pair for pair in pairs if pair not in by_hand], pool.map(sample, new), strict=True)
        checkpointed = dict(zip(pairs, pool.map(sample, alone), strict=True))
        places = list(dict.fromkeys((model, link, share) for model, link, _, share in wanted))
        again = [
            {"what": "within", "name": model, "link": LINKS[link], "share": share, "by_hand": by_hand[model, link]}
            for model, link, share in places
            if "mixes" in by_hand[model, link]
        ]
        inside = dict(zip(places, pool.map(sample, again), strict=False))
        found = dict(zip(wanted, pool.map(sample, limited), strict=True))
    return found, by_hand, checkpointed, inside


def _bounds(name: str, judged: Row, *, timed: bool) -> list[Bound]:
    """What must hold of a row."""
    found = [Bound(what=f"{name}: ends with an error", measured=float("why" in judged), bound=0.0)]
    parts = {"high": ("highest peak × its limit", 1.0), "late": ("step × the best mix's", NEAR)}
    parts |= {"differs": ("trained weights differ", 0.0), "predicted": ("peak is not as predicted", PREDICTED)}
    for key, (what, bound) in parts.items():
        if key in judged and (timed or key != "late"):
            found.append(Bound(what=f"{name}: {what}", measured=judged[key], bound=bound))
    return found


def _judge(row: Row, by_hand: Row, alone: Row, within: Row) -> Row:
    """The numbers of one run."""
    errors = [one["error"] for one in (row, by_hand, alone, within) if "error" in one]
    if errors:
        return {"why": errors[0]}
    judged: Row = {"once": row.get("once")}
    if row["peaks"]:
        judged["high"] = max(row["peaks"]) / row["limit_bytes"]
    if "failed" in row:
        judged["why"] = row["failed"]
    fitting = within["mixes"]
    if not fitting or len(row["seconds"]) <= SETTLED:
        return judged
    # Each shape has its own best mix; a plan is for one shape.
    best = [min(mix["seconds"][shape] for mix in fitting) for shape in range(len(SHAPES))]
    judged["late"] = max(
        seconds / best[number % len(SHAPES)] for number, seconds in enumerate(row["seconds"]) if number >= SETTLED
    )
    judged["differs"] = float(row["bits"] != alone["bits"])
    judged["keep"] = sum(by_hand["keep"]["seconds"]) / sum(best)
    judged["checkpointing"] = sum(alone["seconds"][-len(SHAPES) :]) / sum(best)
    judged["mix"] = min(fitting, key=lambda mix: mix["seconds"][0])["plain"]
    off = [abs(share - 1) for share in row["predicted"][SETTLED:] if share is not None]
    if off:
        judged["predicted"] = max(off)
    return judged


COLUMNS: dict[str, Callable[[Row], object]] = {
    "worst step × best mix": harness.number("late", 1, 3),
    "keep's × best mix": harness.number("keep", 1, 3),
    "checkpointing's × best mix": harness.number("checkpointing", 1, 3),
    "highest peak × limit": harness.number("high", 1, 3),
    "peak off by": harness.number("predicted", 1, 3),
    "run once": lambda row: row.get("once"),
    "best mix keeps": lambda row: row.get("mix"),
    "failed": lambda row: row.get("why"),
}

if __name__ == "__main__":
    raise SystemExit(main())
