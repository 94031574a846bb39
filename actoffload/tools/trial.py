"""``actoffload try``: what a model with gradient checkpointing would gain, on GPUs by prediction and here by a trial.

The prediction runs nothing: the planner plans the model's step from its shapes, with `estimate`'s figures for each GPU.
The trial trains on this machine: a small model of the same type, or the user's own.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import ConfigError
from ..planning.profile import Profile
from ..planning.regions import choosable, with_regions
from ..sizes import format_size
from .console import JsonOption, PathOption, check_paths, grouped, plain, print_json, print_rows, strings
from .environment import BUSY_SHARE, find_device
from .estimate import Question, build_on_paper, states_of
from .on_paper import BUILT_IN, MODELS, RESERVED_BYTES, Hardware, hardware_of
from .process import peak_rss_bytes, prepare_process, say, sum_of_bits, synchronize
from .rok import NO_BLOCKS, predict_variant
from .rok_points import Case, is_own
from .workers import FAILURES, failure, take_turns, turn_ratios

WORKER = "actoffload.tools.trial"
GPUS = ("h100-sxm", "rtx-4090", "rtx-5090")
SMALL = {"hidden": 384, "layers": 8, "seq": 512, "vocab": 1024}
"""The sizes of the small model: a step takes two seconds on two cores. In smaller ones a disk's latency counts."""
SMALL_BATCH = 4
WARM_UP, TURNS = 5, 8
"""Steps before the timed ones (a plan has settled then), and timed ones."""
WITHIN_S, STEP_LIMIT_S = 90.0, 600.0
"""No further turn begins after the first time. A step that takes the second one counts as a hang."""
MORE = 1.5
"""The second prediction has this multiple of the saved bytes that checkpointing has."""
FITS = {"kept": "all", "more_memory": "all but the last", "checkpointed": "the first two"}
"""The columns of the table that fit, by the one of them that needs the most memory."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model's batch, and where it would train."""

    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens; your own make_batch(size) says it.")] = None
    batch: Annotated[int, typer.Option(min=1, help="Samples of a micro-batch.")] = 1
    adapters: Annotated[int | None, typer.Option(min=1, help="Rank of LoRA beside each linear layer.")] = None
    gpu: Annotated[
        list[str] | None, typer.Option(help=f"Preset of `estimate`; repeat. Default: {', '.join(GPUS)}.")
    ] = None
    target: Annotated[str, typer.Option(help="Where bytes would go: host or nvme.")] = "host"


@grouped
def command(
    model: Annotated[
        str,
        typer.Argument(
            help="FILE.py:FUNCTION, a config.json, a model type of Transformers, or a preset of `estimate`.",
            metavar="MODEL",
        ),
    ],
    setup: Setup,
    measure: Annotated[bool, typer.Option(help="Train here, too: a small model of this type, or your own.")] = True,
    path: PathOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare your model's gradient checkpointing with offloading: on GPUs, predicted, and on this machine, in small.

    FUNCTION returns a model and make_batch(size), which returns the model's arguments; the model returns its loss.
    """
    check_paths(path)
    answer: dict[str, Any] = {"model": model, **predicted(model, setup)}
    if not as_json:
        show_predicted(answer)
    if measure:
        answer["measured"] = measured(model, setup, strings(path))
        if not as_json:
            show_measured(answer["measured"])
    if as_json:
        print_json(answer)
    raise typer.Exit(0 if not measure or answer["measured"].get("identical") else 1)


# -- predicted --------------------------------------------------------------------------------------------------------


def predicted(model: str, setup: Setup) -> dict[str, Any]:
    """Predict the step on each GPU: checkpointed, planned in the same memory and in `MORE` of it, and without either.

    Returns:
        ``label``, ``regions``, ``states_bytes``, ``checkpointed_bytes`` and ``kept_bytes`` (saved bytes at the peak),
        and for each GPU a row: seconds with checkpointing, the other steps' ratios to it, and whether each fits.

    Raises:
        ConfigError: the model is not known or has no blocks, or there is no such GPU.
    """
    machines = [hardware_of(name, target=setup.target) for name in setup.gpu or GPUS]  # first: a refusal takes no time
    named: dict[str, Any] = {"model": model} if model in MODELS else {"from_model": model}
    question = Question(sequence=setup.sequence, adapters=setup.adapters, **named)
    workload, label = build_on_paper(question)
    if not workload.blocks:
        raise ConfigError("model", model, NO_BLOCKS)
    from .models import profile_of

    states_bytes = sum(states_of(workload.model, question).values())
    answer: dict[str, Any] = {"label": f"{label}, micro-batch {setup.batch}", "regions": len(workload.blocks)}
    answer |= {"target": setup.target, "states_bytes": states_bytes, "gpus": []}
    for machine in machines:
        row = _on(machine, profile_of(workload, setup.batch, machine)[0], states_bytes)
        answer |= {name: row.pop(name) for name in ("checkpointed_bytes", "kept_bytes")}
        answer["gpus"].append(row)
    return answer


def _on(machine: Hardware, base: Profile, states_bytes: float) -> dict[str, Any]:
    once = with_regions(base, choosable(base))
    checkpointed, kept = (predict_variant(base, once, series, None) for series in ("recompute", "keep"))
    peak = checkpointed.peak_bytes
    same, more = (predict_variant(base, once, "hybrid", int(share * peak)) for share in (1, MORE))
    room = machine.memory_bytes - RESERVED_BYTES - states_bytes
    return {
        "gpu": machine.name,
        "checkpointed_bytes": peak,
        "kept_bytes": kept.peak_bytes,
        "checkpointed_s": checkpointed.step_s,
        "same_memory": same.step_s / checkpointed.step_s,
        "more_memory": more.step_s / checkpointed.step_s,
        "kept": kept.step_s / checkpointed.step_s,
        "fits": {"checkpointed": peak <= room, "more_memory": more.peak_bytes <= room, "kept": kept.peak_bytes <= room},
    }


def show_predicted(answer: dict[str, Any]) -> None:
    """Print the predictions as a table."""
    saved, kept = answer["checkpointed_bytes"], answer["kept_bytes"]
    head = (
        f"{answer['label']}: {answer['regions']} checkpointed blocks. Saved activations at the peak: "
        f"{format_size(saved)} with checkpointing, {format_size(kept)} without. Weights, gradients and optimizer: "
        f"{format_size(answer['states_bytes'])}."
    )
    console = Console()
    console.print(plain(head), highlight=False)
    rows = [
        (
            row["gpu"],
            f"{row['checkpointed_s']:.3g} s",
            *(f"{row[name]:.2f} ×" for name in ("same_memory", "more_memory", "kept")),
            next((said for name, said in FITS.items() if row["fits"][name]), "none"),
        )
        for row in answer["gpus"]
    ]
    names = ("checkpointed", "ours", f"ours, {MORE:g} × bytes", "plain", "fit")
    print_rows(rows, "", *names, title=f"a step, predicted from shapes; offloaded to {answer['target']}")
    console.print(
        "checkpointed: every block runs again. ours: this library beside it, in the same saved bytes. plain: no block "
        "runs again, and nothing moves. ×: of the checkpointed step.",
        style="dim",
        highlight=False,
    )


# -- measured ---------------------------------------------------------------------------------------------------------


def measured(model: str, setup: Setup, path: list[str] | None) -> dict[str, Any]:
    """Train here with checkpointing, alone and with this library attached, each in a process, step by step in turn.

    Returns:
        ``label`` and ``device``; the step's ratio to checkpointing's (``ratio``); of both the peak of the process, or
        of the device, in ``peak_bytes``; the ``moved_bytes`` of all steps; and whether losses and weights are
        ``identical``. Or ``error``.
    """
    if is_own(model):
        case, label = Case(model=model, batch=setup.batch), "your model, each of its blocks checkpointed"
    else:
        from .models import configuration

        kind = MODELS[model].kind if model in MODELS else str(configuration(model).model_type)
        case = Case(model="gpt-small" if kind == BUILT_IN else kind, batch=SMALL_BATCH, **SMALL)  # type: ignore[arg-type]
        label = f"a small {kind}: {case.layers} layers of width {case.hidden}, {case.batch} × {case.seq} tokens"
    about: dict[str, Any] = {"label": label, "device": find_device(), "adapters": setup.adapters}
    specs = {name: about | {"name": name, "case": asdict(case), "path": path} for name in ("checkpointed", "ours")}
    found = take_turns(WORKER, specs, WARM_UP + TURNS, limit_s=STEP_LIMIT_S, within_s=WITHIN_S)
    failed = next((one["error"] for one in found.values() if "error" in one), None)
    if failed is not None:
        return about | {"error": failed}
    theirs, ours = found.values()
    times = [one["step_s"][min(WARM_UP, len(one["step_s"]) - 1) :] for one in (theirs, ours)]
    about |= {"ratio": median(turn_ratios(times[1], times[0])), "checkpointed_s": median(times[0])}
    about |= {"peak_bytes": [theirs["peak_bytes"], ours["peak_bytes"]], "moved_bytes": ours["moved_bytes"]}
    return about | {"identical": theirs["bits"] == ours["bits"], "others_cpu_share": ours["others_cpu_share"]}


def show_measured(found: dict[str, Any]) -> None:
    """Print the trial's result in three lines."""
    console = Console()
    console.print(f"Measured here ({plain(found['device'])}), {plain(found['label'])}:", highlight=False)
    if "error" in found:
        console.print(f"It could not be measured: {plain(found['error'])}", style="red")
        return
    theirs, ours, moved = map(format_size, (*found["peak_bytes"], found["moved_bytes"]))
    owner = "process" if found["device"] == "cpu" else "device"
    console.print(
        f"{found['ratio']:.2f} × checkpointing's step ({found['checkpointed_s']:.3g} s); {owner} memory at its peak "
        f"{ours}, with checkpointing alone {theirs}; {moved} moved.",
        highlight=False,
    )
    if (share := found["others_cpu_share"]) > BUSY_SHARE:
        console.print(f"The machine was busy: others took {share:.0%} of the processors. Times are rough.", style="red")
    if found["identical"]:
        console.print("Losses and trained weights are equal bit for bit.", style="green")
    else:
        console.print("BITS DIFFER: this is a bug; please report it.", style="bold red")


# -- the worker -------------------------------------------------------------------------------------------------------


def train(spec: dict[str, Any]) -> None:
    """Take a step for each line of standard input; print a line for each, and at the end the result."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from .. import attach
    from .models import adapt, build

    device = spec["device"]
    prepare_process(device, None, 0)
    case = Case(**spec["case"])
    workload = build(case, torch.device(device))
    if spec["adapters"] is not None:
        adapt(workload, spec["adapters"])
    for block in map(workload.model.get_submodule, workload.blocks):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    parameters = [one for one in workload.model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    target: Any = "nvme" if device == "cpu" else "auto"  # on a CPU there is no other memory to move to
    ours = attach(workload.model, target=target, path=spec["path"]) if spec["name"] == "ours" else None
    step_s: list[float] = []
    losses: list[str] = []
    say({"turn": 0})
    for _ in sys.stdin:
        batch = workload.batch(case.batch)
        synchronize(device)
        begin_s = time.perf_counter()
        loss = workload.loss(batch)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        step_s.append(time.perf_counter() - begin_s)
        losses.append(float(loss.detach()).hex())
        del loss
        say({"turn": len(step_s)})
    peak = peak_rss_bytes() if device == "cpu" else int(torch.accelerator.max_memory_allocated())
    bits = [*losses, *(sum_of_bits(parameter.detach()) for parameter in parameters)]
    moved = ours.offloader.statistics().moved_bytes if ours is not None else 0
    say({"step_s": step_s, "peak_bytes": peak, "moved_bytes": moved, "bits": bits})


def main(argument: str) -> int:
    """Run the worker that ``argument`` describes; a failure is a result as well."""
    try:
        train(json.loads(argument))
    except FAILURES as error:
        say(failure(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
