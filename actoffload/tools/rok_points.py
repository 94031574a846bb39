"""The cases of a ROK curve, and its measured or predicted points: one for each variant of each case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

LEAST_NOISE = 0.01
"""Two steps of keep are taken to differ by this share at least."""
SERIES = ("keep", "recompute", "offload", "hybrid")


def is_own(source: str) -> bool:
    """Return whether this names a function in a user's file, rather than a preset or a configuration."""
    return ".py:" in source


@dataclass(frozen=True, kw_only=True, order=True)
class Case:
    """A model and its batch. ``hidden`` elements, ``seq`` tokens, ``batch`` sequences, ``vocab`` rows of the head.

    A user's own model (``FILE.py:FUNCTION``) sets its sizes itself. ``adapters``: the rank of LoRA, 0 for none.
    """

    model: str
    batch: int
    hidden: int = 0
    layers: int = 0
    seq: int = 0
    vocab: int = 0
    head_width: int = 64
    dtype: str = "float32"
    adapters: int = 0

    @property
    def panel(self) -> str:
        """The cases with the same text share a panel of the picture."""
        if not self.hidden:
            return self.model
        return f"{self.model}, hidden {self.hidden} × {self.layers} layers, {self.seq} tokens"

    @property
    def name(self) -> str:
        """The panel and the batch."""
        return f"{self.panel}, batch {self.batch}"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A series and, for ``hybrid``, its budget: a share of the peak with all kept, or ``"recompute"`` for its peak."""

    series: str
    level: str = ""

    @property
    def label(self) -> str:
        """The series and its budget, as in ``"hybrid ≤ 40% of keep"``."""
        if not self.level:
            return self.series
        return f"{self.series} ≤ {self.level if self.level in SERIES else f'{float(self.level):.0%} of keep'}"


@dataclass(frozen=True)
class Spread:
    """A median with the middle half of the values around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(median(values), low, high)


def verdict(ratio: Spread, noise: Spread) -> str:
    """Compare a ratio to keep with the A/A noise: a difference needs a middle half that lies outside the noise's.

    The noise counts as 1 % at least: predictions have none, and are no more exact than that.

    >>> verdict(Spread(1.3, 1.2, 1.4), Spread(1.0, 0.9, 1.1)), verdict(Spread(1.05, 1.0, 1.2), Spread(1.0, 0.9, 1.1))
    ('slower', 'as keep')
    """
    if ratio.low > max(noise.high, 1 + LEAST_NOISE):
        return "slower"
    return "faster" if ratio.high < min(noise.low, 1 - LEAST_NOISE) else "as keep"


@dataclass(frozen=True, kw_only=True)
class Point:
    """All samples of one variant of one case. None, or 0 bytes: nothing was measured.

    Attributes:
        peak_bytes: of saved activations on the device, median over the timed steps.
        tflops: keep's throughput at its median step, over the ratio; without a ratio that of the steps.
        ratio: step time over keep's in the same turn; of keep, one of its two steps over the other: A/A noise.
        identical: whether losses and gradients equal keep's bit for bit.
        oom: whether there was no room, in memory or under a budget below the floor of every plan.
    """

    case: Case
    variant: Variant
    device_budget: int | None = None
    peak_bytes: int = 0
    step_s: Spread | None = None
    tflops: Spread | None = None
    ratio: Spread | None = None
    verdict: str = ""
    identical: bool | None = None
    oom: bool = False
    error: str = ""

    @property
    def label(self) -> str:
        """The variant and the batch."""
        return f"{self.variant.label}, batch {self.case.batch}"

    @property
    def failed(self) -> bool:
        """Whether it went wrong otherwise than by a lack of room."""
        return bool(self.error) and not self.oom

    def as_dict(self) -> dict[str, Any]:
        """Return one row, ready for JSON."""
        row = asdict(self)
        return {**row.pop("case"), **row.pop("variant"), **row}
