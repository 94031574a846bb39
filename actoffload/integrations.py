"""The adapters in a checkout, where `integrations/` lies beside this package. An installation has them inside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # the adapters, which Python finds by `__path__`


__path__ = [str(Path(__file__).resolve().parents[1] / "integrations")]
