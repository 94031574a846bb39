"""What offloading would need and cost, on paper: memory, bandwidth, the share that hides, an SSD's life, dollars.

The model is SSDTrain's (arXiv 2408.10013, its section on modelling): a step of ``t`` seconds that saves ``S`` bytes on
a GPU writes them in one half and reads them in the other, so it needs ``S / (t/2)`` each way; a drive lives
``endurance · t / S``. The endurance is the rated one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from ..errors import ConfigError
from ..storage.endurance import (
    Drive,
    check_counts,
    check_positive,
    lifetime_s,
    written_per_day,
)

RESERVED_BYTES = 1 << 30
"""What a GPU holds besides tensors: the CUDA context and libraries' workspaces (a round figure, recalled)."""
LAYERS_IN_TRANSIT = 2
"""Layers whose tensors are on the device at once though they move: the one that runs and the one that is copied."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a step is split over GPUs."""

    tensor: int = 1
    sequence_parallel: bool = False
    """Norms and dropout are split over the tensor-parallel ranks too (Korthikanti et al. 2022)."""
    pipeline: int = 1
    interleave: int = 1
    """Model chunks of a pipeline stage."""
    context: int = 1
    """Ranks that a sequence is split over."""
    data: int = 1
    micro_batches: int = 1
    """Micro-batches of a step and data-parallel rank."""
    zero: int = 0
    """Stage of ZeRO (FSDP is 3): 1 splits optimizer states over the data-parallel ranks, 2 gradients, 3 parameters."""

    def __post_init__(self) -> None:
        check_counts(self, "tensor", "pipeline", "interleave", "context", "data", "micro_batches")
        if self.zero not in range(4):
            raise ConfigError("zero", self.zero, "is a stage, 0 to 3")

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def microbatches_in_flight(self) -> float:
        """Micro-batches that the first stage holds at once under 1F1B, in whole stages' worth.

        ``p``, and ``p·(1 + (p-1)/(p·v))`` with ``v`` chunks per stage (Korthikanti et al. 2022, section 4.2.3); never
        more than there are.
        """
        chunks = (self.pipeline - 1) / (self.pipeline * self.interleave) if self.interleave > 1 else 0.0
        return min(self.micro_batches, self.pipeline * (1 + chunks))


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What one micro-batch of a model saves on one GPU if it had all layers, and the whole model's FLOPs for it.

    Attributes:
        label: the model, for a person.
        micro_batch: samples of it.
        blocks: bytes of each layer.
        recomputed_bytes: what comes back while a layer is recomputed.
        small_bytes: bytes of all layers in tensors that are too small to move.
        ends_bytes: what the rest of the model saves.
        flops: forward, backward and what is recomputed.
        parameter_bytes: of all layers' parameters on this GPU.
        gradient_bytes: of their gradients.
        optimizer_bytes: of the optimizer's states.
        source: how the bytes are known.
    """

    label: str
    micro_batch: int = 1
    blocks: tuple[float, ...]
    recomputed_bytes: float = 0.0
    small_bytes: float = 0.0
    ends_bytes: float = 0.0
    flops: float
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU's share of a machine. Rates in FLOP/s and bytes a second, one way."""

    name: str
    peak_flops: float
    """Dense peak in the type that the model computes in."""
    utilisation: float
    """Share of the peak that a whole step achieves, bubbles, communication and optimizer included, 0 to 1 (MFU where
    nothing is recomputed; what is recomputed runs at the same rate)."""
    link_bytes_per_s: float
    """Between device and host."""
    memory_bytes: int
    """Of the GPU."""
    drive: Drive
    drives: int = 4
    """SSDs per GPU. SSDTrain's paper assumes four."""
    ssd_write_bytes_per_s: float | None = None
    """Host to SSDs, all of this GPU's together, as measured. Default: the drives' rated rates added up."""
    ssd_read_bytes_per_s: float | None = None
    """SSDs to host, likewise."""
    source: str = ""
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        check_positive(self, "peak_flops", "utilisation", "link_bytes_per_s", "memory_bytes")
        check_positive(self, "ssd_write_bytes_per_s", "ssd_read_bytes_per_s")
        check_counts(self, "drives")
        if self.utilisation > 1:
            raise ConfigError("utilisation", self.utilisation, "is a share of the peak, above 0 and at most 1")

    @property
    def write_bytes_per_s(self) -> float:
        """Device to SSD: the slower of the link and the drives."""
        drives = self.drive.write_bytes_per_s * self.drives
        return min(self.link_bytes_per_s, self.ssd_write_bytes_per_s or drives)

    @property
    def read_bytes_per_s(self) -> float:
        """SSD to device: the slower of the drives and the link."""
        drives = self.drive.read_bytes_per_s * self.drives
        return min(self.link_bytes_per_s, self.ssd_read_bytes_per_s or drives)


@dataclass(frozen=True)
class Peak:
    """Saved bytes on the fullest GPU at its peak, and samples of the largest micro-batch that fits so; 0 for none."""

    saved_bytes: float
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a GPU must hold at its peak, in bytes. What operators need while they run is not in it.

    Attributes:
        capacity_bytes: what the GPU has for tensors.
        parameter_bytes: of this GPU's share of the model.
        gradient_bytes: likewise.
        optimizer_bytes: likewise.
        kept: with everything kept.
        hidden: after moving what hides, so that the step is not longer.
        moved: after moving everything.
    """

    capacity_bytes: float
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    kept: Peak
    hidden: Peak
    moved: Peak

    @property
    def states_bytes(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The answer, per GPU. Bytes, seconds, bytes a second and US dollars; None where a price is not known.

    Each attribute is one figure of the answer, so there are more than fifteen.

    Attributes:
        activation_bytes_per_step: what a stage's layers save in tensors that can move, over all micro-batches: S.
        activation_bytes_in_flight: the peak with everything kept: what the fullest stage holds at once.
        small_bytes: what of that peak is in tensors that are too small to move.
        ends_bytes: what embedding, last norm and loss save for a micro-batch; backward follows at once, so it stays.
        step_flops: of one GPU, recomputation included.
        step_s: seconds of a step.
        required_bytes_per_s: S / (t/2), to write and, in the other half of the step, to read.
        write_bytes_per_s: what there is to write.
        read_bytes_per_s: what there is to read.
        share_hidden: of S that moves without making the step longer, at most 1.
        moved_bytes_per_step: that share of S; the rest is kept.
        written_bytes_per_day: of the moved share, over all of the GPU's drives.
        rated_life_s: of the drives, on rated TBW.
        ssd_price_usd: of all of the GPU's drives.
        memory: what is on the GPU, and what fits.
        notes: what a reader must know before quoting a number.
    """

    activation_bytes_per_step: float
    activation_bytes_in_flight: float
    small_bytes: float
    ends_bytes: float
    step_flops: float
    step_s: float
    required_bytes_per_s: float
    write_bytes_per_s: float
    read_bytes_per_s: float
    share_hidden: float
    moved_bytes_per_step: float
    written_bytes_per_day: float
    rated_life_s: float
    ssd_price_usd: float | None
    memory: Memory
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return every field, ready for JSON (an endless life is None there)."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


def estimate(
    activations: Activations,
    split: Parallelism,
    hardware: Hardware,
    *,
    step_s: float | None = None,
) -> Estimate:
    """Estimate what offloading a model's activations needs, per GPU.

    Args:
        activations: the model and its micro-batch; tensor and context parallelism taken into account.
        split: how a step is split over GPUs; the stages of a pipeline are taken as equal.
        hardware: one GPU's share of a machine.
        step_s: seconds of a step as measured. Default: the step's FLOPs over what the GPU achieves.

    Raises:
        ConfigError: the layers cannot be split so.
    """
    layers = len(activations.blocks)
    if layers % (split.pipeline * split.interleave):
        stages = "pipeline × interleave" if split.interleave > 1 else "it"
        raise ConfigError("pipeline", split.pipeline, f"{stages} must divide layers={layers}")
    flops = activations.flops * split.micro_batches * split.data / split.gpus
    seconds = flops / (hardware.peak_flops * hardware.utilisation) if step_s is None else step_s
    if not 0 < seconds < math.inf:
        raise ConfigError("step_s", step_s, "must be a number of seconds above 0")
    per_microbatch = sum(activations.blocks) / split.pipeline
    per_step = per_microbatch * split.micro_batches
    required = per_step / (seconds / 2)
    share = min(1.0, min(hardware.write_bytes_per_s, hardware.read_bytes_per_s) / max(1.0, required))
    moved = share * per_step
    price = None if hardware.drive.price_usd is None else hardware.drive.price_usd * hardware.drives
    in_flight = per_microbatch * split.microbatches_in_flight
    small = activations.small_bytes / split.pipeline * split.microbatches_in_flight
    return Estimate(
        activation_bytes_per_step=per_step,
        activation_bytes_in_flight=in_flight + small,
        small_bytes=small,
        ends_bytes=activations.ends_bytes,
        step_flops=flops,
        step_s=seconds,
        required_bytes_per_s=required,
        write_bytes_per_s=hardware.write_bytes_per_s,
        read_bytes_per_s=hardware.read_bytes_per_s,
        share_hidden=share,
        moved_bytes_per_step=moved,
        written_bytes_per_day=written_per_day(moved, seconds),
        rated_life_s=lifetime_s(hardware.drive.rated_written_bytes * hardware.drives, seconds, moved),
        ssd_price_usd=price,
        memory=_memory(activations, split, hardware, in_flight=in_flight, small=small, share=share),
        notes=tuple(_notes(activations, hardware, share, share * in_flight)),
    )


def _memory(
    activations: Activations, split: Parallelism, hardware: Hardware, *, in_flight: float, small: float, share: float
) -> Memory:
    """Return what is on the fullest GPU: the first stage of a pipeline, which is not the one with the loss."""
    shards = [split.pipeline * (split.data if split.zero >= stage else 1) for stage in (3, 2, 1)]
    parts = (activations.parameter_bytes, activations.gradient_bytes, activations.optimizer_bytes)
    parameters, gradients, optimizer = (nbytes / ranks for nbytes, ranks in zip(parts, shards, strict=True))
    capacity = hardware.memory_bytes - RESERVED_BYTES
    free = max(0.0, capacity - parameters - gradients - optimizer)
    rest = small + activations.recomputed_bytes + (activations.ends_bytes if split.pipeline == 1 else 0.0)

    def peak(moves: float) -> Peak:
        in_transit = min(moves * in_flight, LAYERS_IN_TRANSIT * max(activations.blocks))
        saved = rest + (1 - moves) * in_flight + in_transit
        return Peak(saved, int(free * activations.micro_batch / max(1.0, saved)))

    return Memory(
        capacity_bytes=capacity,
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        kept=peak(0.0),
        hidden=peak(share),
        moved=peak(1.0),
    )


def _notes(activations: Activations, hardware: Hardware, share: float, spool: float) -> list[str]:
    notes = []
    if share < 1.0:
        notes.append(f"{share:.0%} hides; moving more would make the step longer, so the rest is kept.")
    if hardware.drive.nand and hardware.ssd_write_bytes_per_s is None:
        notes.append("The drives' rated write rate is for a fresh cache; a measured, sustained one may be much lower.")
    if spool > hardware.drive.capacity_bytes * hardware.drives:
        notes.append("What is in flight does not fit on the drives: more drives, or fewer micro-batches in flight.")
    if activations.source:
        notes.append(f"Bytes by {activations.source}.")
    for part in (hardware.source, hardware.drive.source):
        if "recalled" in part:
            notes.append(f"Check before quoting: {part}.")
    return notes
