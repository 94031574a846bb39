"""The results of a row of the Megatron worker, in a module that does not import Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.integration.evidence import Run

Hint = tuple[Any, str, Any]
"""The arguments of `Offloader.stage`: the key, the direction, and the next phase."""


@dataclass
class Found:
    """The results of one row in one rank.

    Attributes:
        plain: the run without actoffload.
        offloaded: the run with it.
        hints: the calls of `Offloader.stage`, in order.
        printed: the text on standard error.
        evaluated_packed: tensors packed by forward-only passes.
        kept_bytes: bytes that stayed, by reason.
    """

    plain: Run
    offloaded: Run
    hints: list[Hint]
    printed: str
    evaluated_packed: int
    kept_bytes: dict[str, int]
