"""The wear of an SSD by writing: a drive's rating, and the days until it is used up.

Everything here counts against the *rated* terabytes written (TBW), as a warranty does. SSDTrain's
lifetimes (arXiv 2408.10013) are 215 times as long: 2.5 for sequential writes (JESD219), 86 for data that is kept for a
day instead of three years, which no commodity drive offers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError

DAY_S = 86_400
YEAR_S = 365 * DAY_S
"""The year of drive ratings: DWPD = TBW / (capacity × 365 × years)."""


def check_positive(owner: object, *names: str) -> None:
    """Raise a ConfigError that names the field, unless these are finite numbers above 0, or None."""
    for name in names:
        value = getattr(owner, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise ConfigError(name, value, "must be a number above 0")


def check_counts(owner: object, *names: str) -> None:
    """Raise a ConfigError that names the field, unless these are whole numbers of 1 or more, or None."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(name, value, "must be a whole number, 1 or more")


def bytes_of_dwpd(capacity_bytes: int, drive_writes_per_day: float, years: float = 5.0) -> int:
    """The rated bytes written of a drive that is rated in drive writes per day: capacity × DWPD × 365 × years.

    >>> bytes_of_dwpd(1_600_000_000_000, 100)  # Optane P5800X 1.6 TB: 292 PB
    292000000000000000
    """
    return round(capacity_bytes * drive_writes_per_day * 365 * years)


@dataclass(frozen=True, kw_only=True)
class Rating:
    """The rated endurance of one SSD."""

    name: str
    rated_written_bytes: int
    """Rated endurance: TBW × 10¹²."""
    nand: bool = True
    """Flash, which writes slower once its cache is full."""

    def __post_init__(self) -> None:
        check_positive(self, "rated_written_bytes")


@dataclass(frozen=True, kw_only=True)
class Drive(Rating):
    """One SSD as its maker rates it. Sizes in bytes (makers' terabytes are 10¹² bytes), rates in bytes a second."""

    capacity_bytes: int
    write_bytes_per_s: float
    """Sequential write. Makers of consumer drives state it for the SLC cache; a full cache writes slower."""
    read_bytes_per_s: float
    price_usd: float | None = None
    source: str = ""
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "capacity_bytes", "write_bytes_per_s", "read_bytes_per_s", "price_usd")


def lifetime_s(endurance: float, step_s: float, step_bytes: float) -> float:
    """Seconds until ``endurance`` bytes are written: endurance × t_step / S_activations (SSDTrain, arXiv 2408.10013).

    >>> round(lifetime_s(2400e12, 2.0, 12.1e9) / DAY_S, 1)  # 4 × 600 TBW at 12.1 GB/s over half of each step
    4.6
    """
    return math.inf if step_bytes <= 0 else endurance * step_s / step_bytes


def written_per_day(written_bytes: float, elapsed_s: float) -> float:
    """Bytes a day at the rate of ``written_bytes`` in ``elapsed_s`` seconds; 0 when no time has passed."""
    return written_bytes * DAY_S / elapsed_s if elapsed_s > 0 else 0.0


def render_wear(written_bytes: int, elapsed_s: float, drive: Rating | None, *, drives: int = 1) -> list[str]:
    """Return the lines of a report on a measured run: bytes a day, and the projected days to rated TBW.

    Idle time counts, as it does for the drive. There is no line when nothing was written or no time has passed.
    """
    per_day = written_per_day(written_bytes, elapsed_s)
    if per_day <= 0:
        return []
    lines = [
        f"SSD wear: {format_decimal(written_bytes)} written in {format_duration(elapsed_s)}, "
        f"{format_decimal(per_day)} a day at this rate"
    ]
    if drive is None:
        return [lines[0] + "; set drive_tbw= to the drive's rated TBW to see the days that it lasts"]
    rated = drive.rated_written_bytes * drives
    count = f"{drives} × " if drives > 1 else ""
    lines[0] += (
        f"; {format_duration(rated / per_day * DAY_S)} of writing at this rate to the rated "
        f"{format_decimal(rated)} of {count}{drive.name}"
    )
    return lines


def format_decimal(nbytes: float) -> str:
    """Bytes in the powers of 1000 that drives are rated in.

    >>> format_decimal(292e15)
    '292.0 PB'
    """
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} PB"


def format_duration(seconds: float) -> str:
    """A time span for a person; years have 365 days.

    >>> format_duration(4.59 * DAY_S), format_duration(2.7 * YEAR_S)
    ('4.6 days', '2.70 years')
    """
    if math.isinf(seconds):
        return "no end"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 2 * DAY_S:
        return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.1f} min"
    return f"{seconds / DAY_S:.1f} days" if seconds < YEAR_S else f"{seconds / YEAR_S:.2f} years"
