"""``actoffload estimate``: what offloading a model would need, hide, wear out and cost, on paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import groupby
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from ..errors import ConfigError
from ..sizes import format_size, parse_size
from ..storage.endurance import format_decimal, format_duration
from ..testing.gpt import GPTConfig
from .console import (
    LEAST,
    DarkOption,
    JsonOption,
    PictureOption,
    StyleOption,
    draw_or_fail,
    explained_errors,
    print_facts,
    print_json,
)
from .estimates import Activations, Estimate, Hardware, Memory, Parallelism, estimate
from .models import (
    Workload,
    build_gpt,
    build_own,
    build_transformers,
    configuration,
    count,
    is_own,
    read_configuration,
)
from .plots import Look, Style, draw_estimate
from .presets import (
    BUILT_IN,
    DRIVES,
    GPUS,
    LINK_SOURCE,
    MODELS,
    PUBLISHED,
    TB,
    UNITS,
    ModelPreset,
    preset,
)
from .saved_bytes import SavedBytes

_SPLIT = "Model and its split; default: the preset's"
Count = Annotated[int | None, typer.Option(min=1, rich_help_panel=_SPLIT)]
Flag = Annotated[bool | None, typer.Option(rich_help_panel=_SPLIT)]
COUNTED_GPU = "h100-sxm"
"""The GPU where ``--from-model`` is given and no ``--gpu``."""
FROM_MODEL_BATCH = (2048, 1)
"""Tokens and sequences there."""
_MACHINE = "Machine, per GPU; default: the preset's"
Rate = Annotated[float | None, typer.Option(help="GB/s, as measured.", min=LEAST, rich_help_panel=_MACHINE)]


def command(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="Preset to start from; --presets lists them.")] = "gpt3-175b",
    from_model: Annotated[
        str | None, typer.Option(help="Count this: FILE.py:FUNCTION, a config.json, or a model type of Transformers.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Preset of the GPU. Default: the model's.")] = None,
    drive: Annotated[str, typer.Option(help="Preset of the SSD.")] = "980pro-1tb",
    recompute: Annotated[bool, typer.Option(help="Recompute every layer; its input is what stays to move.")] = False,
    step_s: Annotated[float | None, typer.Option(help="Seconds of a measured step. Default: from FLOPs.")] = None,
    sequence: Count = None,
    micro_batch: Count = None,
    tensor: Count = None,
    sequence_parallel: Flag = None,
    pipeline: Count = None,
    interleave: Count = None,
    context: Count = None,
    data: Count = None,
    zero: Annotated[
        int | None, typer.Option(help="Stage of ZeRO over --data ranks; FSDP is 3.", rich_help_panel=_SPLIT)
    ] = None,
    micro_batches: Count = None,
    optimizer_bytes: Annotated[
        float | None,
        typer.Option(min=0, help="Per trained parameter. Default: AdamW's 12, 8 in float32.", rich_help_panel=_SPLIT),
    ] = None,
    memory: Annotated[str | None, typer.Option(help='Of the GPU: "24GiB".', rich_help_panel=_MACHINE)] = None,
    peak_tflops: Annotated[float | None, typer.Option(min=LEAST, rich_help_panel=_MACHINE)] = None,
    utilisation: Annotated[float | None, typer.Option(help="MFU, 0 to 1.", rich_help_panel=_MACHINE)] = None,
    link: Rate = None,
    ssd_write: Rate = None,
    ssd_read: Rate = None,
    drives: Annotated[int, typer.Option(min=1, help="SSDs per GPU.", rich_help_panel=_MACHINE)] = 4,
    tbw: Annotated[float | None, typer.Option(help="Of one SSD, TB.", min=LEAST, rich_help_panel=_MACHINE)] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List the presets and leave.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Set published figures beside ours and leave.")] = False,
    picture: PictureOption = None,
    style: StyleOption = Style.PAPER,
    dark: DarkOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say on paper what offloading needs: memory, bandwidth, the share that hides, the SSDs' life on rated TBW, cost.

    FUNCTION returns a model and make_batch(size), which returns the model's arguments for so many samples.
    """
    if presets or check:
        list_presets(as_json) if presets else list_published(as_json)
        return
    with explained_errors():
        question = ask(ctx.params)
        result = estimate(**question)
    title = f"{from_model or model} on {question['hardware'].name}, per GPU of {question['split'].gpus}"
    if picture is not None:
        draw_or_fail(lambda: draw_estimate(result.memory, picture, f"{title} (on paper)", Look(style, dark)))
    if as_json:
        parts = {name: asdict(question[name]) for name in ("activations", "split", "hardware")}
        print_json({**parts, "estimate": result.as_dict()})
    else:
        show(title, question, result)


def ask(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `estimate`: the presets with the options over them.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    given = {name: value for name, value in options.items() if value is not None}
    start = preset("model", options["model"], MODELS)
    default = Parallelism() if "from_model" in given else start.split
    split = replace(default, **{name: given[name] for name in asdict(default) if name in given})
    gpu, published = (COUNTED_GPU, None) if "from_model" in given else (start.gpu, start.utilisation)
    return {
        "split": split,
        "hardware": hardware_of(given, gpu, published),
        "step_s": options["step_s"],
        "activations": _activations(given, start, split),  # last, as it takes long
    }


def _activations(given: Mapping[str, Any], start: ModelPreset, split: Parallelism) -> Activations:
    """Return what the model saves on one tensor- and context-parallel rank.

    Raises:
        ConfigError: the model is not known, cannot be split so, or has nothing that repeats.
    """
    source = given.get("from_model")
    default = (start.sequence, start.micro_batch) if source is None else FROM_MODEL_BATCH
    sequence, micro_batch = given.get("sequence", default[0]), given.get("micro_batch", default[1])
    rank_only = source is None and start.model_type == BUILT_IN and not split.sequence_parallel
    workload, label = _build(given, start, sequence, split.tensor if rank_only else 1)
    if split.tensor > 1 and not (rank_only or split.sequence_parallel):
        remedy = "a model other than Megatron's needs --sequence-parallel, under which every tensor is split"
        raise ConfigError("tensor", split.tensor, remedy)
    saved = count(workload, micro_batch)
    if not saved.blocks:
        raise ConfigError("from_model", source, "no layers found: some of one class must be in a ModuleList")
    ranks = 1 if rank_only else split.tensor
    states = states_of(workload.model, given.get("optimizer_bytes"))
    recompute = given["recompute"]
    largest = max(saved.blocks.values()) / ranks / split.context
    attention = "flash attention" if saved.fused_attention else "the model's own attention, whose matrices are kept"
    return Activations(
        label=f"{label}, micro-batch {micro_batch}: {kinds_of(saved)}",
        micro_batch=micro_batch,
        blocks=tuple(n / ranks / split.context for n in (saved.inputs if recompute else saved.blocks).values()),
        recomputed_bytes=largest if recompute else 0.0,
        small_bytes=0 if recompute else saved.small / ranks / split.context,
        ends_bytes=saved.ends / ranks / split.context,
        flops=(4 if recompute else 3) * saved.flops * split.tensor / ranks,
        source=f"counting on meta tensors, with {attention}",
        **{name: nbytes / ranks for name, nbytes in states.items()},
    )


def _build(given: Mapping[str, Any], start: ModelPreset, sequence: int, tensor: int) -> tuple[Workload, str]:
    """Return the model on the meta device and its name; of the built-in GPT one of ``tensor`` ranks' share."""
    source, meta = given.get("from_model"), torch.device("meta")
    if source is not None and is_own(source):
        if "sequence" in given:
            raise ConfigError("sequence", sequence, "your own make_batch(size) says it; leave it out")
        return build_own("from_model", source, meta), source
    if source is None and start.model_type == BUILT_IN:
        try:
            sizes = GPTConfig(**start.config, seq=sequence, tensor=tensor)
        except ValueError as error:
            raise ConfigError("tensor", tensor, str(error).partition(": ")[2]) from error
        label = f"GPT of {sizes.layers} layers × {sizes.width}, sequence {sequence}"
        return build_gpt(sizes, dtype=torch.bfloat16, device=meta), label
    config = read_configuration(source) if source is not None else configuration(start.model_type, start.config)
    label = f"{config.model_type}, sequence {sequence}"
    return build_transformers(config, sequence=sequence, dtype=torch.bfloat16, device=meta), label


def states_of(model: nn.Module, optimizer_bytes: float | None) -> dict[str, float]:
    """Return the bytes of parameters, gradients and optimizer states.

    Args:
        model: the model.
        optimizer_bytes: for each parameter that is trained; None for AdamW's: two moments in float32, and a copy in
            float32 of what is narrower.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    default = sum(parameter.numel() * (8 if parameter.itemsize >= 4 else 12) for parameter in trained)
    elements = sum(parameter.numel() for parameter in trained)
    return {
        "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "gradient_bytes": sum(parameter.nbytes for parameter in trained),
        "optimizer_bytes": default if optimizer_bytes is None else optimizer_bytes * elements,
    }


def kinds_of(saved: SavedBytes) -> str:
    """Return the layers in runs of equal size, such as ``"3 × 464.0 MiB, 58 × 725.2 MiB"``."""
    runs = [(len(list(run)), size) for size, run in groupby(map(format_size, saved.blocks.values()))]
    return ", ".join(f"{count} × {size}" for count, size in runs[:4]) + (", …" if len(runs) > 4 else "")


def hardware_of(given: Mapping[str, Any], default_gpu: str = "", published: float | None = None) -> Hardware:
    """Return the machine: a GPU preset and a drive preset, with what was measured over them."""
    name = given.get("gpu", default_gpu)
    gpu = preset("gpu", name, GPUS)
    if name != default_gpu or published is None:
        published = gpu.utilisation
    drive = preset("drive", given["drive"], DRIVES)
    if "tbw" in given:
        rated = round(given["tbw"] * TB)
        drive = replace(drive, rated_written_bytes=rated, name=f"{drive.name} rated {given['tbw']:g} TBW")
    return Hardware(
        name=name,
        peak_flops=given["peak_tflops"] * 1e12 if "peak_tflops" in given else gpu.peak_flops,
        utilisation=given.get("utilisation", published),
        link_bytes_per_s=_giga(given, "link") or gpu.link_bytes_per_s,
        memory_bytes=parse_size("memory", given["memory"]) if "memory" in given else gpu.memory_bytes,
        drive=drive,
        drives=given["drives"],
        ssd_write_bytes_per_s=_giga(given, "ssd_write"),
        ssd_read_bytes_per_s=_giga(given, "ssd_read"),
        source=gpu.source.replace(f"; {LINK_SOURCE}", "") if "link" in given else gpu.source,
    )


def _giga(given: Mapping[str, Any], name: str) -> float | None:
    return given[name] * 1e9 if name in given else None


def show(title: str, question: Mapping[str, Any], result: Estimate) -> None:
    """Print the answer: the activations, the bandwidth, the SSDs, and what to know before quoting a number."""
    print_facts(title, _activation_rows(question["activations"], question["split"], result))
    print_facts("memory of a GPU at its peak", _memory_rows(result.memory))
    print_facts("links and SSDs", _machine_rows(question["hardware"], result))
    for note in result.notes:
        Console().print(f"- {escape(note)}")


def _activation_rows(activations: Activations, split: Parallelism, result: Estimate) -> list[tuple[str, str]]:
    tensor = f"tensor {split.tensor}{' + sequence' if split.sequence_parallel else ''}"
    ranks = f"{tensor}, pipeline {split.pipeline}, context {split.context}, data {split.data}"
    small = f", {format_size(result.small_bytes)} of it too small to move" if result.small_bytes else ""
    return [
        ("model", activations.label),
        ("split", f"{ranks}, {split.micro_batches} micro-batches"),
        ("activations of a step", f"{format_size(result.activation_bytes_per_step)} (S)"),
        ("in flight with all kept", f"{format_size(result.activation_bytes_in_flight)}{small}"),
        ("ends (stay)", f"{format_size(result.ends_bytes)} of embedding, last norm and loss"),
        ("step time", f"{result.step_s:.3g} s ({result.step_flops / result.step_s / 1e12:.0f} TFLOP/s)"),
    ]


def _memory_rows(memory: Memory) -> list[tuple[str, str]]:
    parts = {"parameters": memory.parameter_bytes, "gradients": memory.gradient_bytes}
    parts["optimizer"] = memory.optimizer_bytes
    states = ", ".join(f"{format_size(nbytes)} {name}" for name, nbytes in parts.items())
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
    rows = [
        ("needed, each way", f"{result.required_bytes_per_s / 1e9:.1f} GB/s (S / (t/2))"),
        (
            "there is",
            f"{result.write_bytes_per_s / 1e9:.1f} GB/s to write, {result.read_bytes_per_s / 1e9:.1f} to read",
        ),
        ("share that hides", f"{result.share_hidden:.0%}, {format_size(result.moved_bytes_per_step)} a step"),
        ("drives", f"{hardware.drives} × {hardware.drive.name}, rated {format_decimal(rated)} written"),
        ("written", f"{format_decimal(result.written_bytes_per_day)} a day"),
        ("life on rated TBW", format_duration(result.rated_life_s)),
    ]
    if result.ssd_price_usd is not None:
        rows.append(("price", f"${result.ssd_price_usd:,.0f}"))
    return rows


def list_presets(as_json: bool) -> None:
    """Print the presets and their sources."""
    known: dict[str, Mapping[str, Any]] = {"model": MODELS, "gpu": GPUS, "drive": DRIVES}
    rows = [
        {"option": f"--{kind}", "name": name, "source": entry.source}
        for kind, entries in known.items()
        for name, entry in entries.items()
    ]
    if as_json:
        print_json(rows)
        return
    table = Table("option", "name", "source")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    Console().print(table)


def list_published(as_json: bool) -> None:
    """Set published figures beside the estimates of the same runs."""
    options: dict[str, Any] = {"drive": "980pro-1tb", "drives": 4, "recompute": False, "step_s": None}
    models = dict.fromkeys(one.model for one in PUBLISHED)
    found = {model: estimate(**ask(options | {"model": model})) for model in models}
    rows = [asdict(one) | {"ours": getattr(found[one.model], one.figure) / UNITS[one.unit]} for one in PUBLISHED]
    if as_json:
        print_json(rows)
        return
    table = Table("model", "figure", "published", "ours", "difference", "source")
    for row in rows:
        figures = [f"{row[name]:.4g} {row['unit']}" for name in ("value", "ours")]
        difference = f"{row['ours'] / row['value'] - 1:+.1%}"
        table.add_row(row["model"], row["figure"], *figures, difference, escape(row["source"]))
    Console().print(table)
