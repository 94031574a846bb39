"""Pictures of the report's page for docs/tuning.md: a run on a disk, and the same with a slow one.

    python -m benchmarks.report_pictures [--path DIR] [--steps N] [--tiny]

A GPT of 8 layers of width 256, 8 × 256 tokens, AdamW, ``policy="all"``, two threads; the slow disk has 20 MB/s. A
Chromium draws the top of each page, 736 pixels wide, light and dark, into docs/images; the file of results has the
numbers of both runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from actoffload.testing.faults import SlowEngine
from actoffload.tools.report import write_page
from actoffload.tools.trace_file import load
from actoffload.tools.traced_run import look_at
from benchmarks import harness
from benchmarks.memory_over_step import train
from benchmarks.pictures import IMAGES, WIDTH
from benchmarks.workloads import THREADS, TINY, gpt
from tests.browser import browser

SLOW_BYTES_PER_S = 20e6
RUNS: dict[str, dict[str, Any]] = {
    "report": {},
    "report-slow-disk": {"engine": partial(SlowEngine, bandwidth_bytes_per_s=SLOW_BYTES_PER_S)},
}
"""The options of each run, by the name of its pictures."""
END = "document.querySelector('details').getBoundingClientRect().top"
"""The first part of a page that its pictures leave out: it comes after the chart and the transfers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, draw, write the file of results."""
    parser = harness.make_parser(__doc__, tiny=True)
    parser.add_argument("--steps", type=int, default=5, help="training steps of each run")
    options = parser.parse_args(arguments)
    work = TINY if options.tiny else gpt(8, 256, 256)
    configuration = work | {"dtype": "float32", "threads": THREADS, "steps": options.steps, "slow": SLOW_BYTES_PER_S}
    results = harness.Results("report_pictures", arguments, configuration, keep=not options.tiny)
    images = results.file.parent if options.tiny else IMAGES
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, more in RUNS.items():
            trace, page = Path(folder) / f"{name}.json", Path(folder) / f"{name}.html"
            train(work, options.steps, trace, options.path, policy="all", **more)
            run = look_at(load(trace))
            write_page(run, page)
            draw(page, images)
            rows[name] = run.as_dict() | {"path": f"{name}.json"}
    results.write(rows=rows)
    return 0


def draw(page: Path, images: Path) -> None:
    """Write the top of a page as a reader with a light and one with a dark screen sees it."""
    with browser(page.with_suffix(".browser")) as shown:
        for scheme in ("light", "dark"):
            shown.look(WIDTH, scheme)
            shown.open(page)
            shown.screenshot(images / f"{page.stem}-{scheme}.png", shown.evaluate(END))


if __name__ == "__main__":
    raise SystemExit(main())
