"""Measures the recompute-offload-keep curve: each round of a case in a process of its own, kept at once; resumable."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .environment import BUSY_SHARE, find_device, write_json
from .rok_points import Case, Preset
from .workers import run_worker

WORKER = "actoffload.tools.rok_worker"
VERSION = 2

LIMIT_S = 3600.0
"""The longest that one round may take."""
in_a_process = partial(run_worker, WORKER, limit_s=LIMIT_S)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One round of one case."""

    case: Case
    repeat: int

    @property
    def label(self) -> str:
        """For a person."""
        return f"{self.case.name}, round {self.repeat + 1}"


class RokRun:
    """One run, or the continuation of one.

    Args:
        preset: what is measured.
        file: the results (JSON); rounds that it holds already are not taken again, unless something in them failed.
        environment: the machine and the software.
        command: what repeats this run.
        path: directories of the spool; not written to the results.
        launch: takes a round, in a process of its own; a failure is a result. Tests give their own.

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
        path: Sequence[str] | None = None,
        launch: Callable[[dict[str, Any]], dict[str, Any]] = in_a_process,
    ) -> None:
        self.file = file
        self._preset = preset
        self._path = None if path is None else list(path)
        self._launch = launch
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
                "variants": [asdict(variant) for variant in preset.variants],
                **({"gpu": preset.gpu} if preset.gpu else {}),
            },
            "samples": [],
        }
        if not file.exists():
            return
        old = load_results(file)
        here = self.payload["measured_with"]
        different = [name for name, how in here.items() if old["measured_with"].get(name) != how]
        if different:
            raise ConfigError("out", str(file), f"was measured with another {', '.join(different)}; name a new file")
        failed = {_job(s) for s in old["samples"] if "error" in s and not s.get("oom") and not s.get("below_floor")}
        self.payload["samples"] = [s for s in old["samples"] if _job(s) not in failed]

    def missing(self) -> list[Job]:
        """Return the rounds that the results do not hold yet."""
        there = {_job(sample) for sample in self.payload["samples"]}
        jobs = (Job(case=case, repeat=repeat) for case in self._preset.cases for repeat in range(self._preset.repeats))
        return [job for job in jobs if job not in there]

    def run(self) -> Generator[tuple[Job, list[dict[str, Any]]]]:
        """Take each missing round; yields it with its samples, one for each variant, when they are in the file.

        Raises:
            OSError: the file cannot be written.
        """
        for job in self.missing():
            samples = self._take(job)
            self.payload["samples"] += samples
            self.payload["environment"]["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            write_json(self.file, self.payload)
            yield job, samples

    def _take(self, job: Job) -> list[dict[str, Any]]:
        measured_with = self.payload["measured_with"]
        result = self._launch(measured_with | {"case": asdict(job.case), "path": self._path})
        head = {
            "case": asdict(job.case),
            "repeat": job.repeat,
            "commit": self.payload["environment"].get("commit"),
            "others_cpu_share": result.pop("others_cpu_share", None),
        }
        found = result.get("samples", [result | variant for variant in measured_with["variants"]])  # it failed whole
        return [head | sample for sample in found]


def busy_share(payload: dict[str, Any]) -> float:
    """Return the largest share of the processors that others took in a round; 0 where it never made a machine busy."""
    share: float = max((s.get("others_cpu_share") or 0.0 for s in payload["samples"]), default=0.0)
    return share if share > BUSY_SHARE else 0.0


def _job(sample: dict[str, Any]) -> Job:
    return Job(case=Case(**sample["case"]), repeat=int(sample["repeat"]))


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
