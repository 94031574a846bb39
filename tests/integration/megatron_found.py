"""What a row of the Megatron worker hands back; needs no Megatron to be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.integration.evidence import Run

Hint = tuple[Any, str, Any]
"""What `Offloader.stage` was given: the key, the direction, and what comes next."""


@dataclass
class Found:
    """What one row left behind in one rank.

    Attributes:
        plain: the run without actoffload.
        offloaded: the run with it.
        hints: what the schedule was said to do, in order.
        said: what went to standard error.
        evaluated_packed: tensors packed by forward-only passes.
        kept_bytes: by reason.
    """

    plain: Run
    offloaded: Run
    hints: list[Hint]
    said: str
    evaluated_packed: int
    kept_bytes: dict[str, int]
