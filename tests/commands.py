"""The commands, as tests call them: in this process, and as on a wide terminal."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from actoffload.tools.app import app

runner = CliRunner()


def invoke(*arguments: str, status: int = 0, columns: int = 400) -> str:
    """Run a command and return its output; it has to end with ``status``."""
    result = runner.invoke(app, arguments, env={"COLUMNS": str(columns)})
    assert result.exit_code == status, result.output
    return result.output


def answer(*arguments: str) -> Any:
    return json.loads(invoke(*arguments, "--json"))
