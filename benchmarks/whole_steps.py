"""What the benchmarks of whole training steps on the CPU share: two threads, AdamW, float32, modes in turns."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import harness, turns
from benchmarks.harness import Bound, Sample, Samples
from benchmarks.modes import WARM_UP

THREADS = 2
LIMIT_S = 1200.0
"""Seconds for what a worker does before its first step, and for each step."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the samples of a run say.

    Attributes:
        summary: numbers by the name of what was compared.
        table: the same for people.
        bounds: what must hold.
        right: whether everything computed what it should.
    """

    summary: dict[str, dict[str, Any]]
    table: str
    bounds: Sequence[Bound] = ()
    right: bool = True


def make_parser(
    description: str | None, option: str, choices: Collection[str], *, rounds: int = 3, steps: int = 4
) -> argparse.ArgumentParser:
    """The arguments of a benchmark of whole steps; ``option`` (``--cases``) selects among ``choices``."""
    parser = harness.make_parser(description, rounds=rounds, tiny=True)
    parser.add_argument("--steps", type=int, default=steps, help="timed steps of each sample")
    parser.add_argument(option, nargs="+", choices=list(choices), default=list(choices), help="only these")
    return parser


def run(
    benchmark: str,
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    make_groups: Callable[[argparse.Namespace], Iterable[turns.Group]],
    judge: Callable[[Samples], Verdict],
    *,
    may_fail: Collection[str] = (),
) -> int:
    """Measure, print, write the result files.

    Args:
        benchmark: its name.
        parser: from `make_parser`.
        arguments: what ``main`` was given.
        make_groups: samples in groups, as `benchmarks.turns` takes them; what all have in common is added.
        judge: makes the summary, the table and the bounds.
        may_fail: names of samples that may fail and still leave something to judge.

    Returns:
        1 when a sample failed, something is not right, or a bound does not hold (which is no matter with ``--tiny``).
    """
    options = parser.parse_args(arguments)
    common = {
        "threads": THREADS,
        "device": "cpu",
        "dtype": "float32",
        "steps": options.steps,
        "warm_up": WARM_UP,
        "path": options.path,
        "optimizer": True,
        "options": {"min_bytes": 0} if options.tiny else {},
    }
    given = [dict(group) for group in make_groups(options)]
    groups = [{name: common | dict(spec) for name, spec in group.items()} for group in given]
    results = harness.Results(benchmark, arguments, {"groups": given, **common}, keep=not options.tiny)
    samples = turns.take_rounds(
        groups, options.rounds, limit_s=LIMIT_S, after_round=lambda taken: results.write(samples=taken)
    )
    failed = [name for name, taken in samples.items() if any("error" in sample for sample in taken)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    if not set(failed) <= set(may_fail):
        return 1
    verdict = judge(samples)
    hold = results.finish(verdict.table, verdict.bounds, summary=verdict.summary)
    return 0 if verdict.right and not failed and (hold or options.tiny) else 1


def gpt(layers: int, width: int, sequence: int, *, batch: int = 8) -> dict[str, Any]:
    """The built-in GPT, for `benchmarks.workloads.build`."""
    return {"model": "gpt", "batch": batch, "gpt": {"layers": layers, "width": width, "seq": sequence}}


TINY = gpt(2, 64, 64, batch=2)


def identical(*samples: Iterable[Sample]) -> bool:
    """Whether all training went the same way, bit for bit."""
    return len({turns.trace(sample) for taken in samples for sample in taken}) == 1
