"""Rounds of workers that take their training steps in turns, as `actoffload.tools.workers` has them.

Each is a process of its own, so that its peak memory is its own as well, but a step of one mode lies seconds, not
minutes, from the same step of another: what a noisy machine does meanwhile falls on both. Their ratio is taken turn by
turn, in an order that is turned around each time. The workers are those of `benchmarks.worker`, with ``in_turns``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from actoffload.tools.workers import spread, take_turns, turn_ratios
from benchmarks.harness import ROOT, Sample, Samples, mib

__all__ = ["Group", "line", "ratios", "spread", "take_rounds", "trace"]

WORKER = "benchmarks.worker"
Group = Mapping[str, Mapping[str, Any]]
"""What `benchmarks.worker` is told, by the name of each sample; ``steps`` of the first is that of all."""


def take_rounds(
    groups: Iterable[Group], rounds: int, *, limit_s: float, after_round: Callable[[Samples], object]
) -> Samples:
    """So many samples of each, those of a group in turns, one group after the other; each is printed when it is there.

    Args:
        groups: as `take_turns` takes them; no name twice.
        rounds: samples of each, in processes of their own.
        limit_s: seconds after which one is stopped, for what comes before its first step and for each step.
        after_round: given all samples so far: a run of an hour that is killed should leave what it has measured.
    """
    groups = list(groups)
    samples: Samples = {name: [] for group in groups for name in group}
    for _ in range(rounds):
        for group in groups:
            specs = {name: {**spec, "in_turns": True} for name, spec in group.items()}
            steps = next(iter(group.values()))["steps"]
            for name, sample in take_turns(WORKER, specs, steps, limit_s=limit_s, cwd=ROOT).items():
                samples[name].append(sample)
                print(f"{name}: {sample.get('error') or line(sample)}", flush=True)
        after_round(samples)
    return samples


def line(sample: Sample) -> str:
    """One sample, for a person."""
    if "unavailable" in sample:
        return f"not here: {sample['unavailable']}"
    others = f", others took {sample['others_cpu_share']:.0%} of the processors"
    return f"{sample['median_step_s']:.2f} s a step, peak RSS {mib(sample['peak_rss_bytes'])}{others}"


def ratios(taken: Iterable[Sample], others: Iterable[Sample]) -> list[float]:
    """Step time of the first over the second's, for each round: the median of the quotients within its turns.

    Turns take out what changes from step to step, not what a process has for life, such as where its pages lie: each
    round is one measurement, and how far they lie apart says how good it is.
    """
    return [median(turn_ratios(one["step_s"], other["step_s"])) for one, other in zip(taken, others, strict=True)]


def trace(sample: Sample) -> tuple[Any, ...]:
    """All bits that a sample's steps computed: equal training has equal traces."""
    return (*sample["losses"], sample["first_gradients"], sample["last_parameters"])
