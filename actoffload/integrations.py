"""In a checkout, where the adapters lie in `integrations/` beside this package; once installed, they lie in it."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1] / "integrations")]
