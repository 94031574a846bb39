"""Measures the recompute-offload-keep curve: each sample in a process of its own and kept at once; resumable."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .environment import find_device, write_json
from .rok import SERIES, Case, Preset, Variant
from .workers import run_worker

WORKER = "actoffload.cli.rok_worker"
VERSION = 1

LIMIT_S = 1800.0
"""The longest that one sample may take."""

Launch = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sample to take: which variant of which case, and the how-manieth."""

    case: Case
    variant: Variant
    repeat: int

    @property
    def label(self) -> str:
        """For a person."""
        case = self.case
        return f"{case.model} {case.hidden} × {case.layers}, batch {case.batch}: {self.variant.label}"


class RokRun:
    """One run, or the continuation of one.

    Args:
        preset: what is measured.
        file: the results (JSON); samples that it holds already are not taken again.
        environment: the machine and the software.
        command: what repeats this run.
        series: which series.
        target: where tensors go.
        path: directories of the spool; not written to the results.
        memory_limit: most bytes of each process (CPU) or of its device; None for no limit.
        retry: take samples that failed again.
        launch: takes a sample; tests give their own.

    Raises:
        ConfigError: the file holds something else, or was measured with other options.
    """

    def __init__(
        self,
        preset: Preset,
        file: Path,
        *,
        environment: dict[str, Any],
        command: str,
        series: Sequence[str] = SERIES,
        target: str = "auto",
        path: Sequence[str] | None = None,
        memory_limit: int | None = None,
        retry: bool = False,
        launch: Launch | None = None,
    ) -> None:
        self.file = file
        self._preset = preset
        self._series = series
        self._path = None if path is None else list(path)
        self._launch = launch or launch_worker
        self._commit = environment.get("commit")
        self.payload: dict[str, Any] = {
            "benchmark": "rok",
            "version": VERSION,
            "command": command,
            "environment": environment,
            "measured_with": {
                "device": preset.device or find_device(),
                "threads": preset.threads,
                "warm_up": preset.warm_up,
                "steps": preset.steps,
                "target": target,
                "memory_limit": memory_limit,
            },
            "samples": [],
        }
        if not file.exists():
            return
        old = load_results(file)
        different = [
            name for name, how in self.payload["measured_with"].items() if old["measured_with"].get(name) != how
        ]
        if different:
            raise ConfigError("out", str(file), f"was measured with another {', '.join(different)}; name a new file")
        self.payload["samples"] = [s for s in old["samples"] if not (retry and "error" in s)]

    def missing(self) -> list[Job]:
        """Return the samples that the results do not hold yet: case by case, its variants in turns (A B A B)."""
        there = {_job(sample) for sample in self.payload["samples"]}
        jobs = (
            Job(case=case, variant=variant, repeat=repeat)
            for case in self._preset.cases
            for repeat in range(self._preset.repeats)
            for variant in self._preset.variants(self._series)
        )
        return [job for job in jobs if job not in there]

    def run(self) -> Generator[tuple[Job, dict[str, Any]]]:
        """Take each missing sample; yields it when it is in the file.

        Raises:
            OSError: the file cannot be written.
        """
        for job in self.missing():
            sample = self._take(job)
            self.payload["samples"].append(sample)
            self.payload["environment"]["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            write_json(self.file, self.payload)
            yield job, sample

    def _take(self, job: Job) -> dict[str, Any]:
        head: dict[str, Any] = {
            "case": asdict(job.case),
            **asdict(job.variant),
            "repeat": job.repeat,
            "commit": self._commit,
            "device_budget": None,
        }
        if job.variant.level:
            budget = self._budget(job.case, job.variant.level)
            if budget is None:
                of = job.variant.level if job.variant.level in SERIES else "keep"
                return head | {"error": f"no budget: the peak of {of} is not known", "oom": False}
            head["device_budget"] = budget
        spec = self.payload["measured_with"] | {
            "case": head["case"],
            "series": job.variant.series,
            "device_budget": head["device_budget"],
            "path": self._path,
        }
        return head | self._launch(spec) | head  # what it is a sample of is not the worker's to say

    def _budget(self, case: Case, level: str) -> int | None:
        """Return the bytes of a level, by what earlier samples counted: saved bytes, as a budget is about those."""
        mine = [s for s in self.payload["samples"] if Case(**s["case"]) == case and not s["level"]]
        if level in SERIES:
            found = [s["counted_peak_bytes"] for s in mine if s["series"] == level and "counted_peak_bytes" in s]
            return int(found[0]) if found else None
        whole = [s["counted_peak_bytes"] for s in mine if s["series"] == "keep" and "counted_peak_bytes" in s]
        whole += [s["statistics"]["baseline_peak_bytes"] for s in mine if "statistics" in s]
        return int(float(level) * whole[0]) if whole else None


def _job(sample: dict[str, Any]) -> Job:
    variant = Variant(series=sample["series"], level=sample["level"])
    return Job(case=Case(**sample["case"]), variant=variant, repeat=int(sample["repeat"]))


def launch_worker(spec: dict[str, Any]) -> dict[str, Any]:
    """Take one sample in a process of its own; a failure, also by running out of memory or time, is a result."""
    return run_worker(WORKER, spec, limit_s=LIMIT_S)


def load_results(file: Path) -> dict[str, Any]:
    """Return the results in a file.

    Raises:
        ConfigError: it cannot be read, or holds no results of this version.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["benchmark"] != "rok" or data["version"] != VERSION:
            raise ValueError("of another kind or version")
        for sample in data["samples"]:
            _job(sample)
        data["measured_with"].get("device")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError("results", str(file), f"no results of `actoffload rok` ({error})") from error
    return dict(data)
