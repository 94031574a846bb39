"""``actoffload demo``: the same training run in several modes, each in its own process, step by step in turn.

Run as a module, it is the worker of one mode: a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TextColumn

from ..config import OffloadConfig
from ..errors import ActOffloadError, ConfigError
from ..sizes import format_size
from .console import (
    JsonOption,
    PathOption,
    check_paths,
    grouped,
    option,
    print_busy,
    print_json,
    print_rows,
    progress_bar,
)
from .environment import clock_s, find_device, peak_rss_bytes, prepare_process
from .rok import Spread, verdict
from .workers import say, serve, take_turns, turn_ratios

WORKER = "actoffload.tools.demo"
STEP_LIMIT_S = 3600.0
"""A step that takes longer counts as a hang."""
PLANNING_STEPS = 3
"""The first steps, in which the planner records and plans; the times leave them out."""
TEXT_BYTES = 4 << 20
"""Bytes of the standard library's text: enough that a short run sees no byte twice."""
SEED = 0

Mode = dict[str, Any]
"""The results of one mode's worker, and their ratios to the first mode's."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training run of every mode."""

    steps: Annotated[int, option("Training steps in each mode.", min=1)] = 10
    layers: Annotated[int, option("Blocks of the GPT.", min=1)] = 8
    width: Annotated[int, option("Width of the GPT, a multiple of 64.", min=1)] = 256
    batch: Annotated[int, option("Sequences per step.", min=1)] = 8
    seq: Annotated[int, option("Bytes per sequence.", min=2)] = 256


@grouped
def command(
    training: Training,
    path: PathOption = None,
    target: Annotated[str, option("host, nvme, tiered or auto.")] = "nvme",
    profile: Annotated[Path | None, option("Write the recorded step here, for `actoffload plan`.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a byte-level GPT on Python's own source text, with and without offloading, and compare."""
    check_paths(path, target)
    if profile is not None and not profile.parent.is_dir():
        raise ConfigError("profile", str(profile), "its directory does not exist")
    if profile is not None and training.steps < PLANNING_STEPS:
        raise ConfigError("steps", training.steps, f"--profile needs {PLANNING_STEPS} or more: the first are recorded")
    from ..testing.gpt import GPTConfig

    GPTConfig(layers=training.layers, width=training.width, seq=training.seq)  # refuses what cannot work
    spec = asdict(training) | {"paths": path, "profile": None if profile is None else str(profile)}
    modes = run_demo(spec, target, quiet=as_json)
    # Not the losses: on several threads PyTorch's sum of one may differ in the last bit between two runs of "keep".
    equal = all(mode["weights"] == modes[0]["weights"] for mode in modes)
    if as_json:
        falls = all(mode["losses"][-1] < mode["losses"][0] for mode in modes)
        print_json({"spec": spec, "identical": equal, "loss_falls": falls, "modes": modes})
    else:
        show(spec, modes, equal)
    raise typer.Exit(0 if equal else 1)


def run_demo(spec: dict[str, Any], target: str, *, quiet: bool) -> list[Mode]:
    """Run every mode, step by step in turn, behind a progress bar; return them, ``keep`` first."""
    names = dict.fromkeys(["keep", *(["host"] if find_device() != "cpu" else []), target])
    with progress_bar(TextColumn("{task.fields[loss]}"), quiet=quiet) as progress:
        bars = {name: progress.add_task(name, total=spec["steps"], loss="") for name in names}

        def on_said(name: str, said: dict[str, Any]) -> None:
            if "error" in said:
                raise ActOffloadError(f"mode {name}: {said['error']}")
            if said.get("turn"):
                progress.update(bars[name], advance=1, loss=f"loss {said['loss']:.3f}")

        specs = {name: spec | {"mode": name} for name in names}
        results = take_turns(WORKER, specs, spec["steps"], limit_s=STEP_LIMIT_S, on_said=on_said)
    for name, result in results.items():
        on_said(name, result)
    return compare(results)


def compare(results: dict[str, dict[str, Any]]) -> list[Mode]:
    """Return each mode's result with its step time and ratios to the first mode's, turn by turn, and a verdict.

    A mode's step time is the first mode's median times the mode's ratio, so that times and ratios agree. The first
    mode's ratios are its noise: each of its steps over the next one, and the reverse.
    """
    times = {name: r["step_s"][min(PLANNING_STEPS, len(r["step_s"]) - 1) :] for name, r in results.items()}
    first, *_ = times.values()
    noise = [ratio for one, other in pairwise(first) for ratio in (one / other, other / one)] or [1.0]
    modes = []
    for number, (name, result) in enumerate(results.items()):
        ratios = turn_ratios(times[name], first) if number else noise
        ratio = median(ratios) if number else 1.0
        told = verdict(Spread.of(ratios), Spread.of(noise)) if number else "noise"
        modes.append(
            {"mode": name, **result, "median_step_s": ratio * median(first), "ratio_to_keep": ratio}
            | {"ratios_to_keep": ratios, "verdict": told, "losses_hex": [loss.hex() for loss in result["losses"]]}
        )
    return modes


def show(spec: dict[str, Any], modes: Sequence[Mode], equal: bool) -> None:
    """Print the table and its meaning."""
    console = Console()
    console.print(
        f"GPT of {spec['layers']} layers, width {spec['width']}, on {spec['batch']} × {spec['seq']} bytes of Python's "
        f"standard library, {spec['steps']} steps on {modes[0]['device']}"
    )
    moved = [mode["statistics"] for mode in modes if "statistics" in mode]
    unmoved = {"resident_peak_bytes": moved[0]["baseline_peak_bytes"]} if moved else {}
    columns = [_column(mode, mode.get("statistics", unmoved)) for mode in modes]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    print_rows(rows, "", *(mode["mode"] for mode in modes))  # a column for each, so that it fits 80 columns
    console.print(
        f"The modes took {len(modes[0]['step_s'])} steps in turns. The first {PLANNING_STEPS} do not count, as the "
        "planner looks and plans in them. A ratio is within a turn, with the middle half of all turns; keep's is "
        "its noise, a step over the next one.",
        style="dim",
    )
    print_busy(modes[0]["others_cpu_share"])
    for mode in modes:
        if "report" in mode:
            console.print(f"\n{escape(mode['mode'])}: {escape(mode['report'])}\n", highlight=False)
    if equal:
        console.print("Weights are equal bit for bit after the last step of every mode.", style="green")
    else:
        others = ", ".join(mode["mode"] for mode in modes if mode["weights"] != modes[0]["weights"])
        text = (
            f"WEIGHTS DIFFER from {modes[0]['mode']}'s after the last step ({others}): this is a bug; please report it."
        )
        console.print(text, style="bold red")


def _column(mode: Mode, counted: dict[str, int]) -> dict[str, str]:
    losses, spread = mode["losses"], Spread.of(mode["ratios_to_keep"])
    names = ("resident_peak_bytes", "nvme_written_bytes", "nvme_read_bytes")
    peak, written, read = (format_size(counted[name]) if name in counted else "-" for name in names)
    return {
        "loss, first → last step": f"{losses[0]:.4f} → {losses[-1]:.4f}",
        "step time": f"{mode['median_step_s']:.2f} s",
        "step time / keep's": f"{mode['ratio_to_keep']:.2f} ({spread.low:.2f} to {spread.high:.2f})",
        "verdict": mode["verdict"],
        "saved activations, peak": peak,
        f"{'process' if mode['device'] == 'cpu' else 'device'} memory, peak": format_size(mode["peak_bytes"]),
        "written": written,
        "read": read,
    }


# -- the worker -------------------------------------------------------------------------------------------------------


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Take a training step for every line of standard input, and print a line for each; return the result."""
    import torch

    from ..autograd.offloader import Offloader
    from ..testing.gpt import GPT, GPTConfig

    device = find_device()
    prepare_process(device, None, SEED)
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, library))[:TEXT_BYTES]), dtype=torch.uint8)
    model = GPT(GPTConfig(layers=spec["layers"], width=spec["width"], seq=spec["seq"])).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    choice = torch.Generator().manual_seed(SEED)
    length = spec["seq"] + 1
    offloader = None
    if spec["mode"] != "keep":
        offloader = Offloader(OffloadConfig(target=spec["mode"], path=spec["paths"])).use(model)
    losses: list[float] = []
    step_s: list[float] = []
    say({"turn": 0})
    for _ in sys.stdin:
        begin_s = clock_s(device)
        with offloader or nullcontext():
            starts = torch.randint(0, len(text) - length, (spec["batch"],), generator=choice)
            tokens = torch.stack([text[start : start + length] for start in starts.tolist()]).long().to(device)
            loss = model(tokens[:, :-1], tokens[:, 1:])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        del loss, tokens
        step_s.append(clock_s(device) - begin_s)
        say({"turn": len(losses), "loss": losses[-1]})
    peak_bytes = peak_rss_bytes() if device == "cpu" else int(torch.accelerator.max_memory_allocated())
    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.detach().cpu().numpy().tobytes())
    end: dict[str, Any] = {"device": device, "losses": losses, "step_s": step_s, "peak_bytes": peak_bytes}
    end["weights"] = weights.hexdigest()
    if offloader is not None:
        end |= {"statistics": offloader.statistics().as_dict(), "report": offloader.report()}
        if spec["profile"] is not None:
            assert offloader.profile is not None  # `command` refuses fewer steps than a plan takes
            offloader.profile.save(spec["profile"])
        offloader.close()
    return end


if __name__ == "__main__":
    serve(train, sys.argv[1])
