"""Workers that are all alive and take their training steps in turns, one at a time.

Each is a process of its own, so that its peak memory is its own as well, but a step of one mode lies seconds, not
minutes, from the same step of another: what a noisy machine does meanwhile falls on both. Their ratio is taken turn by
turn, in an order that is turned around each time. A worker (of `benchmarks.worker`, with ``in_turns``) prints one JSON
object when it is warm, one after each line that it is sent, and its result when nothing more comes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Self

from actoffload.analysis.workers import OthersShare, stream_worker
from benchmarks.harness import ROOT, Sample, Samples, mib

WORKER = "benchmarks.worker"
Group = Mapping[str, Mapping[str, Any]]
"""What `benchmarks.worker` is told, by the name of each sample; they take their steps in turns."""


class Worker:
    """One process, until it has said its last.

    Args:
        spec: its options.
        limit_s: seconds after which it is stopped, for what comes before the first step and for each step.
    """

    def __init__(self, spec: Mapping[str, Any], *, limit_s: float) -> None:
        self._input, self._prompt = os.pipe()
        self._open = {self._input, self._prompt}
        options = {**spec, "in_turns": True}
        self._said = stream_worker(WORKER, options, limit_s=limit_s, cwd=ROOT, stdin=self._input, each=True)
        self.last: Sample | None = None

    def __enter__(self) -> Self:
        """Wait until it is warm."""
        try:
            self._listen()
        except BaseException:
            self.__exit__()
            raise
        self._close(self._input)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self._close(self._input)
        self._close(self._prompt)
        self._said.close()

    def step(self) -> None:
        """One step, if it still lives; what it took is in its result."""
        if self.last is None:
            with contextlib.suppress(BrokenPipeError):  # it died, and says so next
                os.write(self._prompt, b"\n")
            self._listen()

    def result(self) -> Sample:
        """What it measured, or how it failed; it ends."""
        self._close(self._prompt)
        while self.last is None:
            self._listen()
        return self.last

    def _listen(self) -> None:
        """Read its next object. One that is no mere note of a turn is its last."""
        said = next(self._said, None)
        if said is None:
            self.last = {"error": "it ended and gave no result", "oom": False}
        elif "turn" not in said:
            self.last = said

    def _close(self, fd: int) -> None:
        if fd in self._open:
            self._open.remove(fd)
            os.close(fd)


def take_turns(group: Group, *, limit_s: float) -> dict[str, Sample]:
    """One sample of each: all are started and warmed up, one after the other; then they take their steps in turns.

    Args:
        group: their options; ``steps`` of the first is that of all.
        limit_s: seconds after which one is stopped, for what comes before its first step and for each step.

    Returns:
        By name, what it measured: ``step_s`` in order, so that those of the same place were taken one after the other.
        ``others_cpu_share`` is that of the whole run. A failure is ``{"error": ...}``; the rest goes on without it.
    """
    others = OthersShare()
    steps = next(iter(group.values()))["steps"]
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(spec, limit_s=limit_s)) for name, spec in group.items()}
        order = list(workers.values())
        for _ in range(steps):
            for worker in order:
                worker.step()
            order.reverse()  # so that what a mode leaves to the system to do does not always fall on the same other one
        found = {name: worker.result() for name, worker in workers.items()}
    share = others.share()
    return {
        name: result if "error" in result else {**result, "others_cpu_share": share} for name, result in found.items()
    }


def take_rounds(
    groups: Iterable[Group], rounds: int, *, limit_s: float, after_round: Callable[[Samples], object]
) -> Samples:
    """So many samples of each, those of a group in turns, one group after the other; each is printed when it is there.

    Args:
        groups: as `take_turns` takes them; no name twice.
        rounds: samples of each, in processes of their own.
        limit_s: as `take_turns` takes it.
        after_round: given all samples so far: a run of an hour that is killed should leave what it has measured.
    """
    groups = list(groups)
    samples: Samples = {name: [] for group in groups for name in group}
    for _ in range(rounds):
        for group in groups:
            for name, sample in take_turns(group, limit_s=limit_s).items():
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
    return [
        float(median(mine / theirs for mine, theirs in zip(one["step_s"], other["step_s"], strict=True)))
        for one, other in zip(taken, others, strict=True)
    ]


def spread(found: Sequence[float]) -> str:
    """Ratios of several rounds, for a table: their median, and from where to where they go."""
    text = f"{median(found):.3f}"
    return text if len(found) == 1 else f"{text} ({min(found):.2f} to {max(found):.2f})"


def trace(sample: Sample) -> tuple[Any, ...]:
    """All bits that a sample's steps computed: equal training has equal traces."""
    return (*sample["losses"], sample["first_gradients"], sample["last_parameters"])
