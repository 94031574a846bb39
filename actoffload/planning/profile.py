"""`Profile`: one step, measured or on paper, as plain data. No torch, no clock.

Times are seconds on the step's *compute* timeline: it begins with the forward, and runs as if nothing had been moved.
Sizes are bytes.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError
from ..policy import KeepReason
from .constants import NO_LOSS, PREFETCH_BYTES
from .json_input import parse, read_file

VERSION = 2
RECOMPUTED = KeepReason.RECOMPUTED.value
DERIVED = KeepReason.DERIVED.value
ROUNDING = 1e-9

DROP, LEAVE, BIRTH, ENTER, NEED, DEATH, HOLD, DROP_AT_ONCE = range(8)
"""Events of a step, in the order of their execution at one moment. `HOLD` and `DROP` are the birth and the death of a
storage that backward makes. At one moment backward lets go of its region first, then needs the inputs of the next
region, and then the next recomputation begins: a device does nothing in between, so two regions are never resident
together. `DROP_AT_ONCE` is the death of such a storage that lives for no time. `ENTER` and `LEAVE` begin and end a
region's forward; they have the region's place."""

Paced = TypeVar("Paced", "Profile", "Storage", "Region", "RegionSave")


def moment(time_s: float) -> int:
    """The time in nanoseconds: events of one moment are equal in them, although their times, which are sums, differ."""
    return round(time_s / ROUNDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One saved storage of the step.

    Attributes:
        index: its place in its forward, as `TensorFacts.index` counts; None if the offloader has no record of it.
        nbytes: its size.
        birth_s: when autograd saved it.
        need_s: when backward first used it; None if backward never did.
        last_need_s: when backward used it last, or it died unused; from then on its memory is free.
        module: the innermost module that saved it.
        tape: which forward of the step saved it, from 0.
        kept: why it can never move (a value of `KeepReason`); empty if it may move.
        let_go: whether a copy that has come back counts as resident no more from ``need_s`` on, and not only from
            ``last_need_s`` on: only one tensor waited for it.
        region: the checkpointed region, by its place, that ran once and saved it; None outside of regions.
        input_of: the region, by its place, whose checkpoint alone saves it, as an input: nothing saves it if that
            region runs once. None for any other storage.
    """

    index: int | None
    nbytes: int
    birth_s: float
    need_s: float | None
    last_need_s: float
    module: str | None = None
    tape: int = 0
    kept: str = ""
    let_go: bool = False
    region: int | None = None
    input_of: int | None = None

    @property
    def movable(self) -> bool:
        """Whether a plan may move it."""
        return self.index is not None and not self.kept and self.nbytes > 0

    @property
    def held(self) -> bool:
        """Whether backward makes it: a recomputation, or from other storages (`KeepReason.DERIVED`)."""
        return self.kept in (RECOMPUTED, DERIVED)

    @property
    def life(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Its birth and its death: their moments and their kinds of event."""
        born, died = moment(self.birth_s), moment(self.last_need_s)
        if not self.held:
            return (born, BIRTH), (died, DEATH)
        # `DROP` comes before `HOLD`, and a death before its own birth would never end.
        return (born, HOLD), (died, DROP_AT_ONCE if born == died else DROP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSave:
    """One storage that a region saves when it runs again: seconds after the recomputation began, bytes, why it stays.

    ``kept`` is as `Storage.kept`: empty if the storage may move when the region runs once. ``outside`` numbers a
    tensor that the region gets by keyword or closure, and other regions may get as well: the first of them that runs
    once saves it. None for the others.
    """

    offset_s: float
    nbytes: int
    kept: str = ""
    outside: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One checkpointed region of a forward: the outermost call of a checkpoint.

    Attributes:
        place: the number of the region in its forward, from 0, in the order of execution.
        name: of the function or module, for reports.
        tape: which forward of the step it is part of, from 0.
        begin_s: when its forward began; ``end_s``: when it ended.
        again_s: when backward began to run it again; None if it ran once, or if backward never reached it.
        recompute_s: how long that took; 0 if it ran once.
        backward_end_s: when backward had left the region; None if that is unknown.
        saves: the storages that the recomputation saved and that did not exist before; () if the region ran once.
        communicates: whether a collective ran inside of it, so that all ranks must decide alike.
        changed: whether the program changed a tensor that the first run saved, before the second run computed it anew.
    """

    place: int
    name: str
    begin_s: float
    end_s: float
    tape: int = 0
    again_s: float | None = None
    recompute_s: float = 0.0
    backward_end_s: float | None = None
    saves: tuple[RegionSave, ...] = ()
    communicates: bool = False
    changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A path for bytes, measured while the step ran: it writes away from the device, and reads back towards it.

    Attributes:
        latency_s: the time of each transfer beside its bytes, when nothing hides it.
        cost_s_each: lost compute time for each storage moved either way (a device idles while hooks run).
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float = 0.0
    cost_s_each: float = 0.0

    @classmethod
    def measured(cls, write: float | None, read: float | None) -> Link | None:
        """A link with these rates, None without any: a direction without a rate counts as fast as the other one."""
        known = write or read
        return None if known is None else cls(write_bytes_per_s=write or known, read_bytes_per_s=read or known)


@dataclass(frozen=True, kw_only=True)  # without slots, for `cached_property`: each step under a plan reads these sums
class Profile:
    """One step: when it saves each storage, how long it computes, and how fast bytes move.

    Attributes:
        storages: in the order in which they were saved.
        regions: the checkpointed regions, in the order of execution.
        host: device ↔ host memory; None if there is no such link (CPU tensors, direct storage).
        disk: host memory ↔ disk, or the device ↔ disk where there is no ``host``.
        forward_s: compute time of all forwards; ``backward_s``: of all backwards.
        other_s: the rest of the step (the optimizer, the data).
        device: ``"cpu"``, ``"cuda"``, ...
        prefetch_bytes: how far ahead of backward the offloader reads unless a plan sets another window.
    """

    storages: tuple[Storage, ...]
    regions: tuple[Region, ...] = ()
    host: Link | None = None
    disk: Link | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0
    other_s: float = 0.0
    device: str = "cpu"
    prefetch_bytes: int = PREFETCH_BYTES

    def __post_init__(self) -> None:
        _check_numbers(self, "")
        _require(self.prefetch_bytes > 0, self.prefetch_bytes, "prefetch_bytes must be above 0")
        _check_links(host=self.host, disk=self.disk)
        for number, region in enumerate(self.regions):
            _check_region(self, f"regions[{number}]", region)
        names = {(region.place, region.tape) for region in self.regions}
        _require(len(names) == len(self.regions), len(self.regions), "two regions of one forward have the same place")
        places: Counter[int] = Counter()
        for number, storage in enumerate(self.storages):
            where = f"storages[{number}]"
            _check_storage(self, where, storage)
            # Entries of a plan apply by place, so a gap would shift each later decision to another storage.
            if storage.index is not None:
                in_order = storage.index == places[storage.tape]
                _require(in_order, storage.index, f"{where}.index must count the places of its tape from 0, in order")
                places[storage.tape] += 1

    @property
    def passes_s(self) -> float:
        """Compute time of forward and backward, with the recomputations of the regions that ran again."""
        return self.forward_s + self.backward_s

    @property
    def step_s(self) -> float:
        """Compute time of a step without waits."""
        return self.passes_s + self.other_s

    @property
    def once(self) -> tuple[int, ...]:
        """The places of the regions that ran once; regions that backward never reached are not among them."""
        ran = {s.region for s in self.storages if s.region is not None}
        # Such a region may have saved nothing, so no storage names it.
        ran |= {r.place for r in self.regions if r.again_s is None and r.backward_end_s is not None}
        return tuple(sorted(ran))

    @property
    def derived_bytes(self) -> int:
        """The most bytes that backward computes again at once from other saved storages."""
        derived = [s for s in self.storages if s.kept == DERIVED]
        changes = sorted(change for s in derived for change in ((s.birth_s, s.nbytes), (s.last_need_s, -s.nbytes)))
        return max(accumulate((nbytes for _, nbytes in changes), initial=0))

    @cached_property
    def forwards(self) -> int:
        """Forward passes of the step that are alive at once."""
        return 1 + max((storage.tape for storage in self.storages), default=0)

    def unit(self, microbatches: int, optimizer_steps: int) -> str:
        """Name the recorded unit of a run: a step, or its micro-batches that end before the next forward begins."""
        # The quotient is 1, or 2 and more. The bound lies between, because a run's counts may end within a step.
        if not optimizer_steps or microbatches < 1.5 * self.forwards * optimizer_steps:
            return "a step"
        return "a micro-batch" if self.forwards == 1 else f"{self.forwards} micro-batches"

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes of all storages that the step saves."""
        return sum(storage.nbytes for storage in self.storages)

    @property
    def movable_bytes(self) -> int:
        """Bytes of the storages that may move."""
        return sum(storage.nbytes for storage in self.storages if storage.movable)

    @cached_property
    def baseline_peak_bytes(self) -> int:
        """The most bytes that are resident at once with nothing moved."""
        changes = []
        for storage in self.storages:
            birth, death = storage.life
            changes += [(*birth, storage.nbytes), (*death, -storage.nbytes)]
        return max(accumulate((nbytes for *_, nbytes in sorted(changes)), initial=0))

    def with_links(self, *, host: Link | None = None, disk: Link | None = None) -> Profile:
        """The same step on other links; a link that is None stays. Returns this profile if no link differs."""
        links = {"host": host or self.host, "disk": disk or self.disk}
        if links == {"host": self.host, "disk": self.disk}:
            return self
        # `replace` would check every storage again, which took 10 ms of each step under a plan.
        _check_links(**links)
        same = copy.copy(self)
        vars(same).update(links)
        return same

    @property
    def computes_again(self) -> bool:
        """Whether a region, if it ran once, would have tensors that backward computes from other saved ones."""
        return any(save.kept == DERIVED for region in self.regions for save in region.saves)

    def is_late(self, step_s: float) -> bool:
        """Whether a step of this length is longer than this one, in which nothing moves."""
        return step_s > (1 + NO_LOSS) * self.step_s

    def lasting(self, step_s: float, other_s: float | None = None) -> Profile:
        """The same step at another pace, so that it takes ``step_s``.

        Args:
            step_s: its new length.
            other_s: of which come after backward; None: as many as before. The optimizer, the data or an evaluation
                take them, so they say nothing of the pace of forward and backward.
        """
        other_s = self.other_s if other_s is None else other_s
        # Several forwards that are alive at once may have such a part between two backwards, too.
        whole = self.forwards > 1 or step_s <= other_s or not self.passes_s
        pace = step_s / max(ROUNDING, self.step_s) if whole else (step_s - other_s) / self.passes_s
        # A storage that lives until after backward may die sooner: the part after backward may be shorter now.
        saves = (tuple(_paced(save, pace) for save in one.saves) for one in self.regions)
        regions = (_paced(one, pace, most_s=step_s, saves=s) for one, s in zip(self.regions, saves, strict=True))
        storages = (_paced(one, pace, most_s=step_s) for one in self.storages)
        other_s = pace * self.other_s if whole else other_s
        return _paced(self, pace, storages=tuple(storages), regions=tuple(regions), other_s=other_s)

    def with_other(self, other_s: float) -> Profile:
        """The same step with another part after backward, unless there may be such parts between backwards as well."""
        if self.forwards > 1 or self.other_s == other_s:
            return self
        ends = [one.last_need_s for one in self.storages] + [one.backward_end_s or 0.0 for one in self.regions]
        if max(ends, default=0.0) > self.passes_s + other_s:
            return self.lasting(self.passes_s + other_s, other_s)
        # As in `with_links`: nothing else changes, and a check of every storage takes long.
        same = copy.copy(self)
        vars(same)["other_s"] = other_s
        return same

    # -- text ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The profile as JSON text; `from_json` reads it back."""
        return json.dumps({"version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile from `to_json`'s text.

        Raises:
            ConfigError: the text is no profile, or a contradictory one; names ``profile``.
        """
        try:
            return parse(text, cls, version=VERSION)
        except ConfigError:
            raise
        except ValueError as error:
            remedy = f"not a profile of version {VERSION} ({error}); give the text of Profile.to_json()"
            raise ConfigError("profile", text[:80], remedy) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file, which other readers see either as before or whole.

        Raises:
            OSError: the file cannot be written.
        """
        target = Path(path)
        partial = target.with_name(f"{target.name}.partial")
        partial.write_text(self.to_json() + "\n", encoding="utf-8")
        partial.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read the profile that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ConfigError: it holds no profile.
        """
        # Invalid UTF-8 must raise ConfigError, as any text that is no profile does.
        return cls.from_json(read_file(path).decode(errors="replace"))


def _paced(part: Paced, pace: float, *, most_s: float = math.inf, **others: Any) -> Paced:
    """The same part with all its seconds times ``pace``, at most ``most_s``, and with other values for these fields."""
    named = {field.name: getattr(part, field.name) for field in fields(part) if field.name.endswith("_s")}
    seconds = {name: min(most_s, pace * value) for name, value in named.items() if value is not None}
    return replace(part, **seconds | others)


def _check_numbers(part: Profile | Storage | Region | RegionSave | Link, where: str) -> None:
    """Check the seconds, bytes and rates of a part; the names of its fields tell which is which."""
    for field in fields(part):
        value, name = getattr(part, field.name), field.name
        if not name.endswith(("bytes", "_s")) or (value is None and name in ("need_s", "again_s", "backward_end_s")):
            continue
        kind: tuple[type, ...]
        kind, what = (int, float), "a number of 0 or more"
        if name.endswith("bytes"):
            kind, what = (int,), "a number of bytes, 0 or more"
        # JSON's true is an int in Python, and no number.
        valid = isinstance(value, kind) and not isinstance(value, bool) and 0 <= value < math.inf
        if name.endswith("_bytes_per_s"):
            valid, what = valid and value > 0, "above 0"
        _require(valid, value, f"{where}{name} must be {what}")


def _check_links(**links: Link | None) -> None:
    for name, link in links.items():
        if link is not None:
            _check_numbers(link, f"{name}.")


def _check_region(profile: Profile, where: str, region: Region) -> None:
    _check_numbers(region, f"{where}.")
    for number, save in enumerate(region.saves):
        _check_numbers(save, f"{where}.saves[{number}].")
    _require(region.place >= 0, region.place, f"{where}.place counts the regions of a forward from 0")
    times = (region.begin_s, region.end_s)
    _require(region.begin_s <= region.end_s, times, f"{where} must begin before it ends")


def _check_storage(profile: Profile, where: str, storage: Storage) -> None:
    _check_numbers(storage, f"{where}.")
    birth_s, last_s = storage.birth_s, storage.last_need_s
    need_s = birth_s if storage.need_s is None else storage.need_s
    times = (birth_s, storage.need_s, last_s)
    _require(birth_s <= need_s <= last_s, times, f"{where} must be born before it is needed, the last time last")
    _require(
        0 <= storage.tape <= len(profile.storages), storage.tape, f"{where}.tape counts the step's forwards from 0"
    )
    # A step's times are sums of floats, so equal moments differ by rounding.
    end_s = profile.step_s * (1 + ROUNDING) + ROUNDING
    _require(last_s <= end_s, last_s, f"{where} is needed after the step's end at {profile.step_s} s")


def _require(valid: bool, value: object, remedy: str) -> None:
    if not valid:
        raise ConfigError("profile", value, remedy)
