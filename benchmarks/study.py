"""The figures of "Breaking the Memory Wall" (arXiv 2406.10728) for four runs of one model, side by side.

    python -m benchmarks.study [--path DIR] [--tiny]

A Llama of Hugging Face trains under DeepSpeed's ZeRO-Offload: stage 2, AdamW on the host (`DeepSpeedCPUAdam`, compiled
at its first use, which takes minutes). Each run is the same program under ``actoffload trace``: as it is, with every
layer checkpointed, with this library, and with both. docs/images/study-*.png has memory by kind, the disk, DeepSpeed's
copies and the processors in use over each run's usual step. On the CPU the device is the process, so DeepSpeed's copies
over a device's link are copies in memory. Without the compiled optimizer (``--tiny``) PyTorch's AdamW stands for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

from actoffload.tools.report import COLOURS
from actoffload.tools.trace_file import PHASES, load
from actoffload.tools.traced_run import AWAY, KINDS, Run, look_at
from benchmarks import harness
from benchmarks.harness import Bound, Row, mib
from benchmarks.pictures import IMAGES
from benchmarks.workloads import THREADS

RUNS = {
    "plain": ("--option=policy=keep", False),
    "checkpointed": ("--option=policy=keep", True),
    "actoffload": ("--option=policy=auto", False),
    "checkpointed, actoffload": ("--option=policy=auto", True),
}
"""An option of ``actoffload trace`` (nothing moves with ``keep``), and whether the layers are checkpointed."""
SIZES = {"layers": 4, "width": 512, "length": 512, "batch": 8, "words": 4096, "steps": 10}
TINY = {"layers": 2, "width": 128, "length": 128, "batch": 4, "words": 64, "steps": 4}
BUCKET = 5_000_000
PARTS = 90
"""The parts of a step for which a rate is drawn."""
WIDTH, HEIGHT, PIXELS = 9.2, 7.6, 160
LABELS = (
    "memory, GiB, beside the\nprocess before training",
    "disk, MB/s\nin | out",
    "DeepSpeed's\ncopies, MB/s\nin | out",
    "processors",
)
"""Of the picture's rows."""
GIB = 1 << 30
LIMIT_S = 1800
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""The C library gives large blocks back as they are freed, as a device's allocator does; else it keeps them."""


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""A group of one process, for DeepSpeed."""

# -- the program ------------------------------------------------------------------------------------------------------


def train(sizes: dict[str, int], checkpointed: bool, compiled: bool) -> None:
    """Train with DeepSpeed alone; print the losses, and the bytes that the kernel counted for this process."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    os.environ.update(ALONE)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does; this would be compiled for a minute
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    shape: dict[str, Any] = {"hidden_size": sizes["width"], "intermediate_size": 8 * sizes["width"] // 3}
    shape |= {"num_hidden_layers": sizes["layers"], "vocab_size": sizes["words"], "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": sizes["batch"], "gradient_clipping": 1.0}
    buckets = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), BUCKET)  # the default is twice the model
    config["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}, **buckets}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": compiled}
    kind = deepspeed.ops.adam.DeepSpeedCPUAdam if compiled else torch.optim.AdamW
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=kind(model.parameters(), lr=1e-4), config=config, dist_init_required=False
    )
    losses, before = [], psutil.Process().io_counters()
    for _ in range(sizes["steps"]):
        tokens = torch.randint(sizes["words"], (sizes["batch"], sizes["length"]))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    engine.actoffload.offloader.synchronize()
    after = psutil.Process().io_counters()
    kernel = {way: getattr(after, f"{way}_bytes") - getattr(before, f"{way}_bytes") for way in ("write", "read")}
    print(json.dumps({"losses": losses, "kernel": kernel}))


# -- the runs ---------------------------------------------------------------------------------------------------------


def trace(name: str, sizes: dict[str, int], compiled: bool, path: str, folder: str) -> tuple[Run, Row]:
    """Train under ``actoffload trace``; the run, and how far its figures lie from the system's."""
    option, checkpointed = RUNS[name]
    file, program = Path(folder) / f"{name}.json", json.dumps([sizes, checkpointed, compiled])
    words = ["-m", "actoffload", "trace", "-o", str(file), "--target=nvme", f"--path={path}", option, "--"]
    command = [sys.executable, *words, "-m", "benchmarks.study", program]
    settings: dict[str, Any] = {"cwd": harness.ROOT, "env": {**os.environ, **MALLOC}, "timeout": LIMIT_S}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **settings)
    found = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    run = look_at(load(file))
    memory = run.memory()
    off = [abs(sum(n for kind, n in at.by_kind.items() if kind != AWAY) / at.total - 1) for at in memory]
    row = run.as_dict() | {"path": file.name, "memory_off": max(off), "losses": found["losses"]}
    row["peak_by_kind"] = max(memory, key=lambda at: at.total).by_kind
    row["kernel_bytes"] = found["kernel"]
    row["traced_bytes"] = {
        way: sum(one.nbytes for one in run.trace.transfers if one.link == f"disk {way}") for way in ("write", "read")
    }
    return run, row


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, draw, write the file of results; 1 when a loss differs or a bound does not hold."""
    parser = harness.make_parser(__doc__, tiny=True)
    options = parser.parse_args(arguments)
    sizes = TINY if options.tiny else SIZES
    results = harness.Results("study", arguments, sizes | {"threads": THREADS}, keep=not options.tiny)
    runs, rows = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            path = options.path or tempfile.gettempdir()
            runs[name], rows[name] = trace(name, sizes, not options.tiny, path, folder)
            results.write(rows=rows)
    for theme in ("light", "dark"):
        draw(runs, (results.file.parent if options.tiny else IMAGES) / f"study-{theme}.png", dark=theme == "dark")
    columns: dict[str, Callable[[Row], object]] = {
        "step, s": harness.number("step_s", 1, 2),
        "memory, peak": lambda row: mib(row["peak_bytes"]),
        "saved activations, peak": lambda row: mib(row["saved_peak_bytes"]),
        **{f"{name}, processor s": partial(_processor_s, name) for name in PHASES},
    }
    bounds = [
        Bound(f"{name}: sum of the kinds, off the total by", row["memory_off"], 0.02) for name, row in rows.items()
    ]
    for way in ("write", "read"):
        traced, kernel = (rows["actoffload"][f"{count}_bytes"][way] for count in ("traced", "kernel"))
        what = f"actoffload: bytes of disk {way}, off the kernel's count for the process by"
        bounds.append(Bound(what, abs(traced / kernel - 1) if kernel else None, 0.05))
    hold = results.finish(harness.table_of("ZeRO-Offload, two threads", rows, columns), bounds)
    return 0 if hold and len({tuple(row["losses"]) for row in rows.values()}) == 1 else 1


def _processor_s(phase: str, row: Row) -> str | None:
    return next((f"{use['processor_s']:.2f}" for use in row["phases"] if use["name"] == phase), None)


# -- the picture ------------------------------------------------------------------------------------------------------


def draw(runs: dict[str, Run], file: Path, *, dark: bool) -> None:
    """Draw a column for each run: memory by kind, both links, processors; one scale in each row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes: dict[str, Any] = {"font.size": 8.5, "axes.titlesize": "medium", "hatch.linewidth": 0.6}
    with pyplot.style.context(["dark_background" if dark else "default", sizes]):
        shape: dict[str, Any] = {"sharex": "col", "sharey": "row", "layout": "constrained", "squeeze": False}
        figure, grid = pyplot.subplots(4, len(runs), figsize=(WIDTH, HEIGHT), **shape, height_ratios=(3, 1.4, 1.4, 1.4))
        for column, (name, run) in zip(grid.T, runs.items(), strict=True):
            column[0].set_title(name, pad=14)
            _memory(column[0], run)
            _link(column[1], run, "disk")
            _link(column[2], run, "host")
            _processors(column[3], run)
            column[3].set_xlabel("seconds of the step")
            for axis in column:
                axis.spines[["top", "right"]].set_visible(False)
                _phases(axis, run, named=axis is column[0])
        for axis, label in zip(grid[:, 0], LABELS, strict=True):
            axis.set_ylabel(label)
        known: dict[str, Any] = {}
        for axis in grid.flatten():
            known |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=6, frameon=False)
        figure.savefig(file, dpi=PIXELS)
        pyplot.close(figure)


def _memory(axis: Any, run: Run) -> None:
    """Stack the kinds over time; activations that are away are hatched."""
    memory = run.memory()
    times = [moment.time_s for moment in memory]
    drawn = KINDS[1:]  # without what the process has before training, which a device would not hold
    kinds = [[moment.by_kind[kind] / GIB for moment in memory] for kind in drawn]
    areas = axis.stackplot(times, kinds, labels=drawn, step="post", linewidth=0)
    for kind, area in zip(drawn, areas, strict=True):
        area.set_facecolor("none" if kind == AWAY else COLOURS[kind])
        if kind == AWAY:
            area.set(hatch="////", edgecolor=COLOURS["saved activations"])


def _link(axis: Any, run: Run, link: str) -> None:
    """Draw rates: out of the device upwards, back to it downwards; others on top of ours."""
    for way, unit in (("write", 1e6), ("read", -1e6)):
        ours, others = (
            numpy.array(run.moved(f"{link} {way}", run.begin_s, run.end_s, PARTS, ours=mine)) / unit
            for mine in (True, False)
        )
        _rate(axis, run, ours, color=COLOURS[way], label=f"{way} by actoffload")
        _rate(axis, run, others, above=ours, color=COLOURS["others"], label="by others")
    axis.axhline(0, color="gray", linewidth=0.5)


def _processors(axis: Any, run: Run) -> None:
    used_s = numpy.array(run.processor_s(run.begin_s, run.end_s, PARTS))
    _rate(axis, run, used_s, color=COLOURS["processors"], label="processors in use")
    axis.axhline(THREADS, color="gray", linewidth=0.5)
    axis.set_ylim(0, 1.15 * THREADS)


def _rate(axis: Any, run: Run, amounts: Any, above: Any = 0.0, **style: Any) -> None:
    """Draw amounts of each part of the step as a rate, on top of other amounts."""
    length_s = run.end_s - run.begin_s
    edges, per_s = numpy.linspace(0, length_s, PARTS + 1), PARTS / length_s
    axis.stairs((amounts + above) * per_s, edges, baseline=above * per_s, fill=True, **style)


def _phases(axis: Any, run: Run, *, named: bool) -> None:
    """Mark where each phase begins; ``named``: with its name above."""
    for phase in run.phases():
        axis.axvline(phase.begin_s, color="gray", linewidth=0.6, linestyle=":")
        if named:
            letters = {"forward": "fwd", "backward": "backward", "optimizer": "opt"}[phase.name]
            middle = ((phase.begin_s + phase.end_s) / 2, 1.01)
            axis.annotate(letters, middle, xycoords=("data", "axes fraction"), ha="center", fontsize="small")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("["):
        train(*json.loads(sys.argv[1]))
    else:
        raise SystemExit(main())
