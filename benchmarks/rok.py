"""The recompute-offload-keep curve: ``actoffload rok`` with its results among those of the benchmarks.

    python -m benchmarks.rok [--preset cpu|ssdtrain|tiny] [--path DIR] [any other option of actoffload rok]

Continues ``rok_PRESET_DATE.json`` where a run of the same day has left it; what failed is taken again.
``actoffload rok --redraw FILE`` draws it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from benchmarks import harness


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; 1 when losses differ or a point failed."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--preset", default="cpu")
    options, others = parser.parse_known_args(arguments)
    file = harness.result_file("rok", options.preset, keep=options.preset != "tiny")
    command = [sys.executable, "-m", "actoffload.cli", "rok", "--preset", options.preset, "--out", str(file), *others]
    if options.path:
        command += ["--path", options.path]
    return subprocess.run(command, cwd=harness.ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
