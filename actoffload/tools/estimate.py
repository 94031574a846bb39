"""``actoffload estimate``: the needs of offloading a model, on paper: memory, links, drives."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape

from ..errors import ConfigError
from ..sizes import format_size
from ..storage.endurance import format_decimal, format_duration
from .console import JsonOption, grouped, option, print_json, print_rows
from .on_paper import (
    BUILT_IN,
    DRIVES,
    GPUS,
    MODELS,
    PUBLISHED,
    RESERVED_BYTES,
    SOURCES,
    SPLIT,
    Activations,
    Estimate,
    Hardware,
    MemoryNeed,
    ModelPreset,
    Parallelism,
    hardware_of,
    preset,
)
from .rok_points import is_own

if TYPE_CHECKING:
    from torch import nn

    from .models import Trainee

COUNTED: dict[str, Any] = {"sequence": 2048, "micro_batch": 1, "gpu": "rtx-4090"}
"""The preset for ``--from-model``."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The user's model and machine; None for the preset's."""

    model: Annotated[str, option("Preset to start from; --presets lists them.")] = "llama3-8b"
    from_model: Annotated[str | None, option("Or FILE.py:FUNCTION, a config.json, or a type of Transformers.")] = None
    gpu: Annotated[str | None, option("Preset of the GPU. Default: the model's.")] = None
    drive: Annotated[str, option("Preset of the SSD.")] = "980pro-1tb"
    step_s: Annotated[float | None, option("Seconds of a measured step. Default: from FLOPs.")] = None
    sequence: Annotated[int | None, option(min=1, panel=SPLIT)] = None
    micro_batch: Annotated[int | None, option(min=1, panel=SPLIT)] = None
    adapters: Annotated[int | None, option("Rank of LoRA beside each linear layer; the rest is frozen.", min=1)] = None
    trained: Annotated[float, option("Share of parameters that is trained, for other adapters.", min=0, max=1)] = 1.0
    optimizer_bytes: Annotated[
        float | None, option("Per trained parameter. Default: AdamW's 12, 8 in float32.", min=0, panel=SPLIT)
    ] = None

    @property
    def start(self) -> ModelPreset:
        """The preset, whose values hold for every option that the user leaves out."""
        if self.from_model is not None:
            return ModelPreset(kind="", config={}, **COUNTED)
        return preset("model", self.model, MODELS)


@grouped
def command(
    question: Question,
    split: Annotated[dict[str, Any], Parallelism],
    machine: Annotated[dict[str, Any], Hardware],
    presets: Annotated[bool, option("List the presets and leave.", "--presets")] = False,
    check: Annotated[bool, option("Set published figures beside ours and leave.", "--check")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say on paper what offloading needs: memory, bandwidth, the share that hides, the SSDs' life on rated TBW.

    FUNCTION returns a model and make_batch(size), which returns the model's arguments for that many samples.
    """
    if presets or check:
        rows = list_presets() if presets else list_published()
        if as_json:
            print_json(rows)
        else:
            print_rows(map(_cells, rows), *rows[0], title="GB that a step saves" if check else None)
        return
    answer = Answer(question, split, machine)
    gpus = answer.split.tensor * answer.split.data
    title = f"{question.from_model or question.model} on {answer.hardware.name}, per GPU of {gpus}"
    if as_json:
        parts = {name: asdict(getattr(answer, name)) for name in ("activations", "split", "hardware")}
        print_json({**parts, "estimate": answer.result.as_dict()})
    else:
        show(title, answer)


class Answer:
    """The presets with the user's options over them, and the estimate that follows."""

    def __init__(self, question: Question, split: dict[str, Any], machine: dict[str, Any]) -> None:
        self.split = replace(question.start.split, **split)
        self.hardware = hardware_of(question.gpu or question.start.gpu, question.drive, **machine)
        self.activations = activations_of(question, self.split)  # takes long: after everything that may be refused
        self.result = Estimate(self.activations, self.split, self.hardware, step_s=question.step_s)


def activations_of(question: Question, split: Parallelism) -> Activations:
    """Count the bytes that the model saves on one tensor-parallel rank."""
    from .models import count

    start = question.start
    micro_batch = question.micro_batch or start.micro_batch
    # The built-in GPT can be built as one rank's share: without sequence parallelism its norms stay whole there.
    rank_only = start.kind == BUILT_IN and not split.sequence_parallel
    workload, label = build_on_paper(question, split.tensor if rank_only else 1)
    if split.tensor > 1 and not (rank_only or split.sequence_parallel):
        remedy = "a model other than Megatron's needs --sequence-parallel, under which every tensor is split"
        raise ConfigError("tensor", split.tensor, remedy)
    saved = count(workload, micro_batch)
    if not saved.blocks:
        remedy = "no layers found: some of one class must be in a ModuleList"
        raise ConfigError("from_model", question.from_model, remedy)
    ranks = 1 if rank_only else split.tensor
    runs = [(len(list(run)), size) for size, run in groupby(map(format_size, saved.blocks))]
    kinds = ", ".join(f"{number} × {size}" for number, size in runs[:4]) + (", …" if len(runs) > 4 else "")
    return replace(
        saved,
        label=f"{label}, micro-batch {micro_batch}: {kinds}",
        micro_batch=micro_batch,
        blocks=tuple(nbytes / ranks for nbytes in saved.blocks),
        small_bytes=saved.small_bytes / ranks,
        ends_bytes=saved.ends_bytes / ranks,
        # A frozen weight needs no gradient, so a backward with adapters takes as long as a forward.
        flops=(3 if question.adapters is None else 2) * saved.flops * split.tensor / ranks,
        **{name: nbytes / ranks for name, nbytes in states_of(workload.model, question).items()},
    )


def build_on_paper(question: Question, tensor: int = 1) -> tuple[Trainee, str]:
    """Return the model on meta tensors, adapters included, and its name; ``tensor`` ranks share the built-in GPT."""
    from .models import adapt

    workload, label = _build(question, question.sequence or question.start.sequence, tensor)
    if question.adapters is None:
        return workload, label
    if question.trained < 1:
        remedy = "the rank of adapters says what is trained: leave one of the two out"
        raise ConfigError("trained", question.trained, remedy)
    adapt(workload, question.adapters)
    return workload, f"{label}, adapters of rank {question.adapters}"


def _build(question: Question, sequence: int, tensor: int) -> tuple[Trainee, str]:
    import torch

    from ..testing.gpt import GPTConfig
    from .models import build_gpt, build_own, build_transformers, configuration

    start, source, meta = question.start, question.from_model, torch.device("meta")
    if source is not None and is_own(source):
        if question.sequence is not None:
            raise ConfigError("sequence", sequence, "your own make_batch(size) says it; leave it out")
        return build_own("from_model", source, meta), source
    if start.kind == BUILT_IN:
        sizes = GPTConfig(**start.config, seq=sequence, tensor=tensor)
        label = f"GPT of {sizes.layers} layers × {sizes.width}, sequence {sequence}"
        return build_gpt(sizes, dtype=torch.bfloat16, device=meta), label
    config = configuration(source or start.kind, **start.config)
    label = f"{config.model_type}, sequence {sequence}"
    return build_transformers(config, sequence=sequence, dtype=torch.bfloat16, device=meta), label


def states_of(model: nn.Module, question: Question) -> dict[str, Any]:
    """Return the bytes of parameters, gradients and optimizer states.

    By default the optimizer is AdamW: two moments in float32, and a float32 copy of narrower parameters.
    """
    given, share = question.optimizer_bytes, question.trained
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    default = sum(parameter.numel() * (8 if parameter.itemsize >= 4 else 12) for parameter in trained)
    elements = sum(parameter.numel() for parameter in trained)
    return {
        "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "gradient_bytes": share * sum(parameter.nbytes for parameter in trained),
        "optimizer_bytes": share * (default if given is None else given * elements),
    }


# -- as text ----------------------------------------------------------------------------------------------------------


def show(title: str, answer: Answer) -> None:
    """Print the answer: what to do, the activations, the memory, the bandwidth, the SSDs, and notes for a reader."""
    warnings = [note for note in answer.result.notes if note.startswith("WEAR")]
    for line in (*advice(answer), *warnings):
        Console().print(escape(line), style="bold")
    print_rows(_activation_rows(answer), title=title)
    print_rows(_memory_rows(answer.result.memory), title="memory of a GPU at its peak")
    print_rows(_machine_rows(answer.hardware, answer.result), title="links and where bytes go")
    for note in (note for note in answer.result.notes if note not in warnings):
        Console().print(f"- {escape(note)}")


def advice(answer: Answer) -> list[str]:
    """Return what to do so that the model fits, as sentences with options."""
    memory, split = answer.result.memory, answer.split
    free = memory.capacity_bytes - memory.states_bytes
    kept, hidden, moved = memory.kept, memory.hidden, memory.moved
    if kept.saved_bytes <= free:
        more = f"; with offloading up to {hidden.micro_batch}" if hidden.micro_batch > kept.micro_batch else ""
        return [f"It fits as it is, up to micro-batch {kept.micro_batch}{more}."]
    if hidden.saved_bytes <= free:
        return ["It fits with offloading, and no step is longer."]
    if moved.saved_bytes <= free:
        return ["It fits with offloading and device_budget=: more has to move than hides, so steps wait."]
    ways = []
    if moved.micro_batch:
        ways.append(f"--micro-batch {moved.micro_batch}")
    elif free > 0:
        ways.append("a shorter --sequence, or gradient checkpointing")
    if memory.gradient_bytes > 0.1 * memory.parameter_bytes:
        ways.append("--adapters 16")
    if split.zero < 3:
        ways.append("--zero 3 --data N over N GPUs")
    needed = memory.states_bytes + moved.saved_bytes + RESERVED_BYTES
    ways += [f"--gpu {name}" for name, gpu in GPUS.items() if gpu["memory_bytes"] >= needed][:1]
    return [f"It does NOT fit, even with all moved: {format_size(needed)} are needed. Try {'; or '.join(ways)}."]


def _activation_rows(answer: Answer) -> list[tuple[str, str]]:
    split, result, saved = answer.split, answer.result, answer.activations
    tensor = f"tensor {split.tensor}{' + sequence' if split.sequence_parallel else ''}"
    small = f", and {format_size(saved.small_bytes)} in tensors too small to move" if saved.small_bytes else ""
    return [
        ("model", saved.label),
        ("split", f"{tensor}, data {split.data}, ZeRO {split.zero}"),
        ("activations of a step", f"{format_size(result.activation_bytes_per_step)} (S){small}"),
        ("ends (stay)", f"{format_size(saved.ends_bytes)} of embedding, last norm and loss"),
        ("step time", f"{result.step_s:.3g} s ({result.step_flops / result.step_s / 1e12:.0f} TFLOP/s)"),
    ]


def _memory_rows(memory: MemoryNeed) -> list[tuple[str, str]]:
    parts = [f"{format_size(memory.parameter_bytes)} parameters", f"{format_size(memory.gradient_bytes)} gradients"]
    states = ", ".join([*parts, f"{format_size(memory.optimizer_bytes)} optimizer"])
    rows = [
        ("there is", f"{format_size(memory.capacity_bytes)} for tensors"),
        ("model states", f"{format_size(memory.states_bytes)}: {states}"),
    ]
    for name, peak in {"all kept": memory.kept, "what hides moves": memory.hidden, "all moves": memory.moved}.items():
        needed = memory.states_bytes + peak.saved_bytes
        fits = "fits" if needed <= memory.capacity_bytes else "does NOT fit"
        rows.append((name, f"{format_size(needed)}, {format_size(peak.saved_bytes)} of it saved: {fits}"))
        rows.append(("", f"the largest micro-batch that fits: {peak.micro_batch or 'none'}"))
    return rows


def _machine_rows(hardware: Hardware, result: Estimate) -> list[tuple[str, str]]:
    rated = hardware.drive.rated_written_bytes * hardware.drives
    rates = f"{result.write_bytes_per_s / 1e9:.1f} GB/s to write, {result.read_bytes_per_s / 1e9:.1f} to read"
    rows = [
        ("needed, each way", f"{result.required_bytes_per_s / 1e9:.1f} GB/s (S / (t/2))"),
        ("there is", rates),
        ("share that hides", f"{result.share_hidden:.0%}, {format_size(result.moved_bytes_per_step)} a step"),
    ]
    if hardware.target == "host":
        return rows
    return [
        *rows,
        ("drives", f"{hardware.drives} × {hardware.drive.name}, rated {format_decimal(rated)} written"),
        ("written", f"{format_decimal(result.written_bytes_per_day)} a day"),
        ("life on rated TBW", format_duration(result.rated_life_s)),
    ]


def list_presets() -> list[dict[str, Any]]:
    """Return the presets and their sources."""
    rows = [("--model", name, SOURCES[entry.source]) for name, entry in MODELS.items()]
    rows += [("--gpu", name, SOURCES[entry["source"]]) for name, entry in GPUS.items()]
    rows += [("--drive", name, entry.source) for name, entry in DRIVES.items()]
    return [{"option": option, "name": name, "source": source} for option, name, source in rows]


def list_published() -> list[dict[str, Any]]:
    """Return published figures, GB that a step saves, with the estimates of the same runs as ``ours``."""
    rows = []
    for row in PUBLISHED:
        ours = Answer(Question(model=row["model"]), {}, {}).result.activation_bytes_per_step / 1e9
        rows.append(row | {"ours": ours, "difference": f"{ours / row['value'] - 1:+.1%}"})
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    return [value if isinstance(value, str) else f"{value:.3g}" for value in row.values()]
