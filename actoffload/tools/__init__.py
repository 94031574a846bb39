"""The command line ``actoffload``. The only place that imports typer and rich."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from .app import app

    app()


__all__ = ["main"]
