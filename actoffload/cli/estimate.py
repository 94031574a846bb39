"""``actoffload estimate``: what offloading a model would need, hide, wear out and cost, on paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from itertools import groupby
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..analysis.estimate import Activations, Estimate, Hardware, estimate, megatron_activations
from ..analysis.estimate_presets import DRIVES, GPUS, LINK_SOURCE, MODELS, TB, CountedModel, preset
from ..analysis.megatron import MegatronModel, Parallelism
from ..analysis.saved_bytes import MIN_BYTES, SavedBytes, count_saved
from ..errors import ConfigError
from ..sizes import format_size
from ..storage.endurance import Credits, format_decimal, format_duration
from .console import JsonOption, explained_errors, print_facts, print_json
from .models import build_own, build_transformers, import_transformers, is_own, read_configuration

Count = Annotated[int | None, typer.Option(min=1, rich_help_panel="Model and its split; default: the preset's")]
Flag = Annotated[bool | None, typer.Option(rich_help_panel="Model and its split; default: the preset's")]
LEAST = 1e-6
COUNTED_GPU = "h100-sxm"
"""The GPU where ``--from-model`` is given and no ``--gpu``."""
FROM_MODEL_BATCH = (2048, 1)
"""Tokens and sequences there."""
_MACHINE = "Machine, per GPU; default: the preset's"
Rate = Annotated[float | None, typer.Option(help="GB/s, as measured.", min=LEAST, rich_help_panel=_MACHINE)]
Multiplier = Annotated[float, typer.Option(rich_help_panel="Credits on the rated TBW; 1.0 is none")]


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
    micro_batches: Count = None,
    peak_tflops: Annotated[float | None, typer.Option(min=LEAST, rich_help_panel=_MACHINE)] = None,
    utilisation: Annotated[float | None, typer.Option(help="MFU, 0 to 1.", rich_help_panel=_MACHINE)] = None,
    link: Rate = None,
    ssd_write: Rate = None,
    ssd_read: Rate = None,
    drives: Annotated[int, typer.Option(min=1, help="SSDs per GPU.", rich_help_panel=_MACHINE)] = 4,
    tbw: Annotated[float | None, typer.Option(help="Of one SSD, TB.", min=LEAST, rich_help_panel=_MACHINE)] = None,
    write_amplification_rated: Multiplier = 1.0,
    write_amplification_workload: Multiplier = 1.0,
    retention_credit: Multiplier = 1.0,
    presets: Annotated[bool, typer.Option("--presets", help="List the presets and leave.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say on paper what offloading needs: bytes, bandwidth, the share that hides, the SSDs' life on rated TBW, cost."""
    if presets:
        list_presets(as_json)
        return
    with explained_errors():
        question = ask(ctx.params)
        result = estimate(**question)
    if as_json:
        parts = {name: asdict(question[name]) for name in ("activations", "split", "hardware", "credits")}
        print_json({**parts, "estimate": result.as_dict()})
    else:
        show(from_model or model, question, result)


def ask(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `estimate`: the presets with the options over them.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    given = {name: value for name, value in options.items() if value is not None}
    start = preset("model", options["model"], MODELS)
    default = Parallelism() if "from_model" in given else start.split
    split = replace(default, **{name: given[name] for name in _names(Parallelism) if name in given})
    batch: dict[str, int] = {name: given[name] for name in ("sequence", "micro_batch") if name in given}
    gpu, published = (COUNTED_GPU, None) if "from_model" in given else (start.gpu, start.utilisation)
    return {
        "activations": _activations(given.get("from_model"), start.model, batch, split, recompute=given["recompute"]),
        "split": split,
        "hardware": _hardware(given, gpu, published),
        "credits": Credits(**{name: given[name] for name in _names(Credits)}),
        "step_s": options["step_s"],
    }


def _activations(
    source: str | None,
    model: MegatronModel | CountedModel,
    batch: dict[str, int],
    split: Parallelism,
    *,
    recompute: bool,
) -> Activations:
    """Return what the model saves: by formula, or counted."""
    if source is None and isinstance(model, MegatronModel):
        return megatron_activations(replace(model, **batch), split, recompute=recompute)
    if source is not None and is_own(source):
        if "sequence" in batch:
            raise ConfigError("sequence", batch["sequence"], "your own make_batch(size) says it; leave it out")
        size = batch.get("micro_batch", 1)
        own = build_own("from_model", source, torch.device("meta"))
        counted = count_saved(own.model, own.batch(size))
        return counted_activations(counted, f"{source}, micro-batch {size}", split, recompute=recompute)
    if source is not None:
        config, default = read_configuration(source), FROM_MODEL_BATCH
    else:
        assert isinstance(model, CountedModel)
        config = import_transformers(model.model_type).AutoConfig.for_model(model.model_type, **model.config)
        default = (model.sequence, model.micro_batch)
    sequence, micro_batch = batch.get("sequence", default[0]), batch.get("micro_batch", default[1])
    counted = count_transformers(config, sequence=sequence, micro_batch=micro_batch)
    label = f"{config.model_type}, sequence {sequence}, micro-batch {micro_batch}"
    return counted_activations(counted, label, split, recompute=recompute)


def count_transformers(
    config: Any, *, sequence: int, micro_batch: int, min_bytes: int = MIN_BYTES, dtype: torch.dtype = torch.bfloat16
) -> SavedBytes:
    """Count a model of Transformers in training, with its head and loss where its type has one.

    Args:
        config: its configuration.
        sequence: tokens of a sequence.
        micro_batch: sequences.
        min_bytes: smaller tensors stay.
        dtype: what it computes in.
    """
    workload = build_transformers(config, sequence=sequence, dtype=dtype, device=torch.device("meta"))
    # It asks the positions' values whether sequences are packed, and meta tensors have none: they are not packed.
    with patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None):
        return count_saved(workload.model, workload.batch(micro_batch), min_bytes=min_bytes)


def counted_activations(saved: SavedBytes, label: str, split: Parallelism, *, recompute: bool) -> Activations:
    """Return what was counted as `estimate` takes it, on one tensor- and context-parallel rank.

    Raises:
        ConfigError: it cannot be split so, or nothing was found that repeats.
    """
    if not saved.blocks:
        raise ConfigError(
            "from_model", label, "no blocks found: an estimate is of layers in a ModuleList or Sequential"
        )
    if split.tensor > 1 and not split.sequence_parallel:
        remedy = "a counted model needs --sequence-parallel, under which every tensor is split"
        raise ConfigError("tensor", split.tensor, remedy)
    ranks = split.tensor * split.context
    blocks = saved.inputs if recompute else saved.blocks
    attention = "flash attention" if saved.fused_attention else "the model's own attention, whose matrices are kept"
    return Activations(
        label=f"{label}: {kinds_of(saved)}",
        blocks=tuple(nbytes / ranks for nbytes in blocks.values()),
        small_bytes=0 if recompute else saved.small / ranks,
        ends_bytes=saved.ends / ranks,
        flops=(4 if recompute else 3) * saved.flops,
        source=f"counting on meta tensors, with {attention}",
    )


def kinds_of(saved: SavedBytes) -> str:
    """Return the layers in runs of equal size, such as ``"3 × 464.0 MiB, 58 × 725.2 MiB"``."""
    runs = [(len(list(run)), size) for size, run in groupby(map(format_size, saved.blocks.values()))]
    return ", ".join(f"{count} × {size}" for count, size in runs[:4]) + (", …" if len(runs) > 4 else "")


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def _hardware(given: Mapping[str, Any], default_gpu: str, published: float | None) -> Hardware:
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
        drive=drive,
        drives=given["drives"],
        ssd_write_bytes_per_s=_giga(given, "ssd_write"),
        ssd_read_bytes_per_s=_giga(given, "ssd_read"),
        source=gpu.source.replace(f"; {LINK_SOURCE}", "") if "link" in given else gpu.source,
    )


def _giga(given: Mapping[str, Any], name: str) -> float | None:
    return given[name] * 1e9 if name in given else None


def show(model: str, question: Mapping[str, Any], result: Estimate) -> None:
    """Print the answer: the activations, the bandwidth, the SSDs, and what to know before quoting a number."""
    title = f"{model} on {question['hardware'].name}, per GPU of {question['split'].gpus}"
    print_facts(title, _activation_rows(question["activations"], question["split"], result))
    print_facts("links and SSDs", _machine_rows(question["hardware"], question["credits"].factor, result))
    for note in result.notes:
        Console().print(f"- {escape(note)}")


def _activation_rows(activations: Activations, split: Parallelism, result: Estimate) -> list[tuple[str, str]]:
    tensor = f"tensor {split.tensor}{' + sequence' if split.sequence_parallel else ''}"
    ranks = f"{tensor}, pipeline {split.pipeline}, context {split.context}, data {split.data}"
    small = f", {format_size(result.small_bytes)} of it too small to move" if result.small_bytes else ""
    return [
        ("model", activations.label),
        ("split", f"{ranks}, {split.micro_batches} micro-batches"),
        ("activations of a layer", f"{format_size(max(activations.blocks))} a micro-batch"),
        ("activations of a step", f"{format_size(result.activation_bytes_per_step)} (S)"),
        ("peak with all kept", f"{format_size(result.activation_bytes_in_flight)} in flight{small}"),
        ("ends (stay)", f"{format_size(result.ends_bytes)} of embedding, last norm and loss"),
        ("step time", f"{result.step_s:.3g} s ({result.step_flops / result.step_s / 1e12:.0f} TFLOP/s)"),
    ]


def _machine_rows(hardware: Hardware, factor: float, result: Estimate) -> list[tuple[str, str]]:
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
    if factor != 1.0:
        rows.append((f"life with credits × {factor:g}", format_duration(result.credited_life_s)))
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
