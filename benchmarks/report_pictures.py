"""Pictures of the report's page for docs/tuning.md: a run on a disk, and the same with a slow one.

    python -m benchmarks.report_pictures [--path DIR] [--steps N] [--tiny]

A GPT of 8 layers of width 256, 8 × 256 tokens, AdamW, ``policy="all"``, two threads; the slow disk has 20 MB/s. A
Chromium draws the top of each page, 736 pixels wide, light and dark, into docs/images; the file of results has the
numbers of both runs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import actoffload
from actoffload.analysis.report_page import write_page
from actoffload.analysis.trace_file import load
from actoffload.analysis.traced_run import Run, look_at
from actoffload.testing.faults import SlowEngine
from benchmarks import harness, whole_steps
from benchmarks.pictures import IMAGES, WIDTH
from benchmarks.workloads import build
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
    work = (whole_steps.TINY if options.tiny else whole_steps.gpt(8, 256, 256)) | {"dtype": "float32"}
    configuration = work | {"threads": whole_steps.THREADS, "steps": options.steps, "slow": SLOW_BYTES_PER_S}
    results = harness.Results("report_pictures", arguments, configuration, keep=not options.tiny)
    images = results.file.parent if options.tiny else IMAGES
    rows = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for name, more in RUNS.items():
            run = train(work, options.steps, folder / f"{name}.json", {"path": options.path, **more})
            write_page([run], folder / f"{name}.html")
            draw(folder / f"{name}.html", images)
            rows[name] = run.as_dict() | {"path": f"{name}.json"}
    results.write(rows=rows)
    return 0


def train(work: dict[str, Any], steps: int, trace: Path, options: Mapping[str, Any]) -> Run:
    """Train with a trace; the run that it has."""
    torch.set_num_threads(whole_steps.THREADS)
    torch.manual_seed(0)
    made = build(work)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        with actoffload.offload_activations(
            "nvme", policy="all", trace=os.fspath(trace), model=made.model, **options
        ) as offloader:
            loss, _ = made.forward()
        loss.backward()
        optimizer.step()
    offloader.close()
    return look_at(load(trace))


def draw(page: Path, images: Path) -> None:
    """Write the top of a page as a reader with a light and one with a dark screen sees it."""
    with browser(page.with_suffix(".browser")) as shown:
        for scheme in ("light", "dark"):
            shown.look(WIDTH, scheme)
            shown.open(page)
            shown.screenshot(images / f"{page.stem}-{scheme}.png", shown.evaluate(END))


if __name__ == "__main__":
    raise SystemExit(main())
