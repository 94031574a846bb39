"""The adapter's arguments from a command line, for the tests of it."""

from __future__ import annotations

import argparse

from actoffload.integrations.megatron import add_actoffload_args


def parse(text: str) -> argparse.Namespace:
    """Arguments from a command line."""
    parser = argparse.ArgumentParser()
    add_actoffload_args(parser)
    return parser.parse_args(text.split())
