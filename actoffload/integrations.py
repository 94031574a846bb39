"""In a checkout, where the adapters lie in `integrations/` beside this package; once installed, they lie in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # what is found by `__path__`


__path__ = [str(Path(__file__).resolve().parents[1] / "integrations")]
