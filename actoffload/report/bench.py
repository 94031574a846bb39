"""What a measured path could hide from a training step, and which engine, block size and depth does best there.

The rule is SSDTrain's (arXiv 2408.10013): what a step of ``t`` seconds saves is written in one half of it and read
back in the other, so ``S`` bytes hide where ``S / (t/2)`` is at most what the disk sustains. As writes and reads
overlap in a real step, the rate that counts is the slowest of writing, reading and both at once (their bytes added up).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal, get_args

from ..config import format_size
from ..estimate import required_bytes_per_s

Direction = Literal["write", "read", "mixed"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
NEARLY = 0.97
"""A setting that reaches this share of the best one does as well."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """How the disk is used."""

    engine: str
    block_bytes: int
    depth: int
    """Transfers at the same time, in each directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed run of one direction."""

    setting: Setting
    direction: Direction
    bytes_per_s: float
    """Mixed: written and read together."""
    seconds: float
    processor_s: float
    """Of the whole process, engine threads included."""
    direct: bool
    """Past the page cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A setting that could not be measured."""

    setting: Setting
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The medians of one setting, bytes a second; None: not measured."""

    setting: Setting
    direct: bool
    write: float | None
    read: float | None
    mixed: float | None

    @property
    def sustained(self) -> float | None:
        """The slowest of what was measured: what a step can count on. None without both ways."""
        if self.write is None or self.read is None:
            return None
        return min(rate for rate in (self.write, self.read, self.mixed) if rate is not None)


def rates_of(samples: Iterable[Sample]) -> list[Rates]:
    """The medians of each setting, in the order in which settings first appear."""
    by_setting: dict[Setting, list[Sample]] = {}
    for sample in samples:
        by_setting.setdefault(sample.setting, []).append(sample)
    rates = []
    for setting, mine in by_setting.items():
        values = {way: [s.bytes_per_s for s in mine if s.direction == way] for way in DIRECTIONS}
        middle = {way: median(found) if found else None for way, found in values.items()}
        rates.append(Rates(setting=setting, direct=all(s.direct for s in mine), **middle))
    return rates


def best_of(rates: Sequence[Rates]) -> Rates | None:
    """The setting that hides most; of those that are nearly as good, the one with the least in flight.

    What goes through the page cache measures memory as well as the disk, so it is chosen only where nothing else runs.
    """
    usable = [one for one in rates if one.sustained is not None]
    usable = [one for one in usable if one.direct] or usable
    top = max((one.sustained or 0.0 for one in usable), default=0.0)
    good = (one for one in usable if (one.sustained or 0.0) >= NEARLY * top)
    return min(good, key=lambda one: one.setting.depth * one.setting.block_bytes, default=None)


def hidden_bytes(step_s: float, bytes_per_s: float) -> float:
    """How many bytes a step of ``step_s`` seconds writes and reads back without becoming longer.

    Args:
        step_s: seconds of a training step.
        bytes_per_s: what the disk sustains both ways: `Rates.sustained`.

    >>> hidden_bytes(2.0, 3e9)
    3000000000.0
    """
    return step_s / 2 * bytes_per_s


def hiding_step_s(saved_bytes: float, bytes_per_s: float) -> float:
    """The shortest step, in seconds, that hides ``saved_bytes``: the inverse of `hidden_bytes`."""
    return 2 * saved_bytes / bytes_per_s


def advice(best: Rates, step_s: float | None = None, saved_bytes: int | None = None) -> list[str]:
    """Sentences on what training could hide here.

    Args:
        best: of `best_of`.
        step_s: seconds of the user's step; without it, of a step of one second.
        saved_bytes: what the user's step saves for backward.
    """
    rate = best.sustained or 0.0
    setting = best.setting
    lines = [
        f"Best: {setting.engine}, blocks of {format_size(setting.block_bytes)}, {setting.depth} at once: "
        f"{_gb(rate)} both ways (the slowest of write, read and mixed)."
    ]
    seconds = 1.0 if step_s is None else step_s
    hidden = hidden_bytes(seconds, rate)
    lines.append(
        f"A step of {seconds:g} s hides {format_size(hidden)} written and read back: half of the step at {_gb(rate)}, "
        "as far as the disk goes."
    )
    if saved_bytes is not None:
        needed = hiding_step_s(saved_bytes, rate)
        if step_s is not None:
            share = min(1.0, hidden / saved_bytes)
            required = required_bytes_per_s(saved_bytes, step_s)
            lines.append(
                f"Of {format_size(saved_bytes)} saved in a step of {step_s:g} s, {share:.0%} hides: "
                f"all of it would need {_gb(required)} both ways."
            )
        lines.append(f"{format_size(saved_bytes)} hide in a step of {needed:.3g} s or more.")
    if not best.direct:
        lines.append("No engine went past the page cache here: these rates are also those of memory.")
    return lines


def as_dict(
    samples: Sequence[Sample],
    failures: Sequence[Failure],
    best: Rates | None,
    step_s: float | None,
    saved_bytes: int | None,
) -> dict[str, Any]:
    """Everything, ready for JSON. Bytes, seconds, bytes a second."""
    rate = None if best is None else best.sustained
    seconds = 1.0 if step_s is None else step_s
    training: dict[str, Any] | None = None
    if rate:
        hidden = hidden_bytes(seconds, rate)
        training = {
            "step_s": seconds,
            "sustained_bytes_per_s": rate,
            "hidden_bytes": hidden,
            "saved_bytes": saved_bytes,
            "share_hidden": min(1.0, hidden / saved_bytes) if saved_bytes and step_s is not None else None,
            "hiding_step_s": hiding_step_s(saved_bytes, rate) if saved_bytes else None,
        }
    return {
        "samples": [asdict(sample) for sample in samples],
        "failures": [asdict(failure) for failure in failures],
        "rates": [asdict(one) | {"sustained": one.sustained} for one in rates_of(samples)],
        "best": None if best is None else asdict(best) | {"sustained": rate},
        "training": training,
    }


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"
