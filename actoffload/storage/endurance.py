"""The wear of an SSD by writing, and the days until it is used up.

Everything here counts against the *rated* terabytes written (TBW), as a warranty does. SSDTrain's
lifetimes (arXiv 2408.10013) are 215 times as long: 2.5 for sequential writes (JESD219), 86 for data that is kept for a
day instead of three years, which no commodity drive offers.
"""

from __future__ import annotations

import math

DAY_S = 86_400
YEAR_S = 365 * DAY_S
"""The year of drive ratings: DWPD = TBW / (capacity × 365 × years)."""


def written_per_day(written_bytes: float, elapsed_s: float) -> float:
    """Bytes a day at the rate of ``written_bytes`` in ``elapsed_s`` seconds; 0 when no time has passed."""
    return written_bytes * DAY_S / elapsed_s if elapsed_s > 0 else 0.0


def render_wear(written_bytes: int, elapsed_s: float, rated_bytes: int | None, *, drives: int = 1) -> list[str]:
    """Return the lines of a report on a measured run: bytes a day, and the projected days to rated TBW.

    Idle time counts, as it does for the drive. There is no line when nothing was written or no time has passed.
    ``rated_bytes``: of writes, for which each drive is rated.
    """
    per_day = written_per_day(written_bytes, elapsed_s)
    if per_day <= 0:
        return []
    written = f"{format_decimal(written_bytes)} written in {format_duration(elapsed_s)}"
    line = f"SSD wear: {written}, {format_decimal(per_day)} a day at this rate"
    if rated_bytes is None:
        return [f"{line}; set drive_tbw= to the drive's rated TBW to see the days that it lasts"]
    rated = rated_bytes * drives
    life, count = format_duration(rated / per_day * DAY_S), f"{drives} × " if drives > 1 else ""
    return [f"{line}; {life} of writing at this rate to the rated {format_decimal(rated)} of {count}the drive"]


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
