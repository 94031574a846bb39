"""``actoffload try``: what a model with gradient checkpointing would gain, on GPUs by prediction and here by a trial.

The prediction runs nothing: the planner plans the model's step from its shapes, with `estimate`'s figures for each GPU.
The trial trains on this machine: a small model of the same type, or the user's own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import ConfigError
from ..planning.profile import Profile
from ..sizes import format_size
from .console import JsonOption, PathOption, check_paths, grouped, option, plain, print_busy, print_json, print_rows
from .environment import find_device
from .estimate import NO_BLOCKS, Question, build_on_paper, predict_variant, states_of
from .on_paper import MODELS, Case, Hardware, hardware_of, is_own
from .rok import WORKER, Variant
from .workers import run_worker, turn_ratios

GPUS = ("h100-sxm", "rtx-4090", "rtx-5090")
SMALL: dict[str, Any] = {"hidden": 384, "layers": 8, "seq": 512, "vocab": 1024}
"""The sizes of the small model: a step takes two seconds on two cores. In smaller ones a disk's latency counts."""
SMALL_BATCH = 4
VARIANTS = (Variant(series="keep"), Variant(series="recompute"), Variant(series="hybrid", level="recompute"))
"""Neither, checkpointing alone, and this library beside it with its memory: series of `rok`."""
WARM_UP, TURNS, WITHIN_S, LIMIT_S = 4, 6, 90.0, 1800.0
"""Steps before the timed ones (a plan has settled then), timed ones, and the seconds after which no turn begins."""
MORE = 1.5
"""The second prediction has this multiple of the saved bytes that checkpointing has."""
FITS = {"kept": "all", "more_memory": "all but the last", "checkpointed": "the first two"}
"""The columns of the table that fit, by the one of them that needs the most memory."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model's batch, and where it would train."""

    sequence: Annotated[int | None, option("Tokens; your own make_batch(size) says it.", min=1)] = None
    batch: Annotated[int, option("Samples of a micro-batch.", min=1)] = 1
    adapters: Annotated[int | None, option("Rank of LoRA beside each linear layer.", min=1)] = None
    gpu: Annotated[list[str] | None, option(f"Preset of `estimate`; repeat. Default: {', '.join(GPUS)}.")] = None
    target: Annotated[str, option("Where bytes would go: host or nvme.")] = "host"


MODEL = typer.Argument(help="FILE.py:FUNCTION, a config.json, a type of Transformers, or a preset of `estimate`.")


@grouped
def command(
    model: Annotated[str, MODEL],
    setup: Setup,
    measure: Annotated[bool, option("Train here, too: a small model of this type, or your own.")] = True,
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
        answer["measured"] = measured(model, setup, path)
        if not as_json:
            show_measured(answer["measured"])
    if as_json:
        print_json(answer)
    raise typer.Exit(0 if not measure or answer["measured"].get("identical") else 1)


# -- predicted --------------------------------------------------------------------------------------------------------


def predicted(model: str, setup: Setup) -> dict[str, Any]:
    """Predict the step on each GPU: checkpointed, planned in the same memory and in `MORE` of it, and plain."""
    machines = [hardware_of(name, target=setup.target) for name in setup.gpu or GPUS]  # first: a refusal takes no time
    named: dict[str, Any] = {"model": model} if model in MODELS else {"from_model": model}
    question = Question(sequence=setup.sequence, adapters=setup.adapters, **named)
    workload, label = build_on_paper(question)
    if not workload.blocks:
        raise ConfigError("model", model, NO_BLOCKS)
    from .models import profiles_of

    states_bytes = sum(states_of(workload.model, question).values())
    answer: dict[str, Any] = {"label": f"{label}, micro-batch {setup.batch}", "regions": len(workload.blocks)}
    answer |= {"target": setup.target, "states_bytes": states_bytes, "gpus": []}
    for machine in machines:
        row = _on(machine, *profiles_of(workload, setup.batch, machine)[:2], states_bytes)
        answer |= {name: row.pop(name) for name in ("checkpointed_bytes", "kept_bytes")}
        answer["gpus"].append(row)
    return answer


def _on(machine: Hardware, base: Profile, once: Profile, states_bytes: float) -> dict[str, Any]:
    checkpointed, kept = (predict_variant(base, once, series, None) for series in ("recompute", "keep"))
    peak = checkpointed.peak_bytes
    same, more = (predict_variant(base, once, "hybrid", int(share * peak)) for share in (1, MORE))
    room = machine.tensor_bytes - states_bytes
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
    checkpointed, kept, states = (format_size(answer[f"{of}_bytes"]) for of in ("checkpointed", "kept", "states"))
    head = (
        f"{answer['label']}: {answer['regions']} checkpointed blocks. Saved activations at the peak: {checkpointed} "
        f"with checkpointing, {kept} without. Weights, gradients and optimizer: {states}."
    )
    console = Console(highlight=False)
    console.print(plain(head))
    rows = []
    for row in answer["gpus"]:
        ratios = (f"{row[name]:.2f} ×" for name in ("same_memory", "more_memory", "kept"))
        fits = next((said for name, said in FITS.items() if row["fits"][name]), "none")
        rows.append((row["gpu"], f"{row['checkpointed_s']:.3g} s", *ratios, fits))
    names = ("checkpointed", "ours", f"ours, {MORE:g} × bytes", "plain", "fit")
    print_rows(rows, "", *names, title=f"a step, predicted from shapes; offloaded to {answer['target']}")
    console.print(
        "checkpointed: every block runs again. ours: this library beside it, in the same saved bytes. plain: no block "
        "runs again, and nothing moves. ×: of the checkpointed step.",
        style="dim",
    )


# -- measured ---------------------------------------------------------------------------------------------------------


def measured(model: str, setup: Setup, path: list[str] | None) -> dict[str, Any]:
    """Train here with checkpointing, alone and with this library, step by step in turn: a case of `rok`.

    ``ratio``: of the steps. ``peak_bytes``: of saved activations, of both. ``moved_bytes``: of all steps. Or ``error``.
    """
    adapters: dict[str, Any] = {"adapters": setup.adapters or 0}
    if is_own(model):
        case, label = Case(model=model, batch=setup.batch, **adapters), "your model, each of its blocks checkpointed"
    else:
        from .models import configuration

        kind = MODELS[model].kind if model in MODELS else str(configuration(model).model_type)
        case = Case(model=kind, batch=SMALL_BATCH, **SMALL, **adapters)
        label = f"a small {kind}: {case.layers} layers of width {case.hidden}, {case.batch} × {case.seq} tokens"
    about: dict[str, Any] = {"label": label, "device": find_device()}
    spec = {"case": asdict(case), "variants": [asdict(variant) for variant in VARIANTS], "device": about["device"]}
    spec |= {"threads": None, "warm_up": WARM_UP, "steps": TURNS, "within_s": WITHIN_S, "path": path}
    result = run_worker(WORKER, spec, limit_s=LIMIT_S)
    _, theirs, ours = result.get("samples", [result] * 3)
    if failed := theirs.get("error") or ours.get("error"):
        return about | {"error": failed}
    return about | {
        "ratio": median(turn_ratios(ours["step_s"], theirs["step_s"])),
        "moved_bytes": ours["moved_bytes"],
        "peak_bytes": [median(one["peak_bytes"]) for one in (theirs, ours)],
        "checkpointed_s": median(theirs["step_s"]),
        "identical": theirs["identical"] and ours["identical"],
        "others_cpu_share": result["others_cpu_share"],
    }


def show_measured(found: dict[str, Any]) -> None:
    """Print the trial's result in three lines."""
    console = Console(highlight=False)
    console.print(f"Measured here ({plain(found['device'])}), {plain(found['label'])}:")
    if "error" in found:
        console.print(f"It could not be measured: {plain(found['error'])}", style="red")
        return
    theirs, ours, moved = map(format_size, (*found["peak_bytes"], found["moved_bytes"]))
    console.print(
        f"{found['ratio']:.2f} × checkpointing's step ({found['checkpointed_s']:.3g} s); saved activations at the peak "
        f"{ours}, with checkpointing alone {theirs}; {moved} moved."
    )
    print_busy(found["others_cpu_share"])
    if found["identical"]:
        console.print("Losses and gradients are equal bit for bit.", style="green")
    else:
        console.print("BITS DIFFER: this is a bug; please report it.", style="bold red")
