"""The command line ``actoffload``. The only place that imports typer and rich."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    from .app import app

    app()


__all__ = ["main"]
