"""How a step is split over GPUs, and Megatron-LM's transformer by its published formulas: activations and FLOPs.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4): a
layer with dropout holds ``s·b·h·(34 + 5·a·s/h)`` bytes in 16 bits, of which flash attention takes away the quadratic
term; tensor parallelism leaves ``s·b·h·(10 + 24/t)``, with sequence parallelism ``s·b·h·34/t``. Every other model is
counted (`saved_bytes`); these stay as what papers were measured with, and as tensor parallelism splits unequally.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from ..storage.endurance import check_counts

BYTES = 2
"""Of an activation's element."""


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

    def __post_init__(self) -> None:
        check_counts(self, "tensor", "pipeline", "interleave", "context", "data", "micro_batches")

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

    def check_layers(self, layers: int) -> None:
        """Check that so many layers can be split so.

        Raises:
            ConfigError: they cannot.
        """
        if layers % (self.pipeline * self.interleave):
            stages = "pipeline × interleave" if self.interleave > 1 else "it"
            raise ConfigError("pipeline", self.pipeline, f"{stages} must divide layers={layers}")


@dataclass(frozen=True, kw_only=True)
class MegatronModel:
    """Sizes of a transformer and of one micro-batch on one data-parallel rank; 16 bits, an MLP of 4 × ``hidden``."""

    layers: int
    """Blocks; of T5, encoder and decoder together."""
    hidden: int
    heads: int
    sequence: int
    micro_batch: int
    vocab: int
    cross_layers: int = 0
    """Layers that also attend to the encoder."""
    dropout: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "layers", "hidden", "heads", "sequence", "micro_batch", "vocab")

    @property
    def label(self) -> str:
        """For a person."""
        sizes = f"{self.layers} layers × {self.hidden}, sequence {self.sequence}, micro-batch {self.micro_batch}"
        return f"{sizes}, by Megatron-LM's formulas"


Attention = Literal["flash", "unfused"]


def layer_bytes(
    model: MegatronModel,
    split: Parallelism,
    *,
    attention: Attention = "flash",
    recompute: bool = False,
    cross: bool = False,
) -> float:
    """Return the bytes that one layer leaves for backward on one GPU, for one micro-batch.

    Args:
        model: the model.
        split: how it is split.
        attention: ``unfused`` keeps the softmax's matrices; without them, as with selective recomputation: ``flash``.
        recompute: only the layer's input is kept.
        cross: a decoder layer, with cross-attention.

    Raises:
        ConfigError: the heads cannot be split so.
    """
    if model.heads % split.tensor:
        raise ConfigError("tensor", split.tensor, f"must divide heads={model.heads}")
    elements = model.sequence / split.context * model.micro_batch * model.hidden
    whole = elements / (split.tensor if split.sequence_parallel else 1)  # what tensor parallelism alone does not split
    if recompute:
        return BYTES * whole
    mask = 1 if model.dropout else 0
    parts = 3 if cross else 2  # attention, cross-attention, MLP; each: the norm's input and output, the dropout's mask
    nbytes = parts * (2 * BYTES + mask) * whole
    nbytes += (parts - 1) * 4 * BYTES * elements / split.tensor  # queries, keys, values and the output
    nbytes += 8 * BYTES * elements / split.tensor  # the MLP's two inner tensors of four times the width
    if attention == "unfused":
        square = model.heads / split.tensor * model.micro_batch * model.sequence**2
        nbytes += square * (BYTES + (BYTES + mask if model.dropout else 0))
    return nbytes


def layers_bytes(
    model: MegatronModel, split: Parallelism, *, attention: Attention = "flash", recompute: bool = False
) -> float:
    """Return the bytes that all layers leave on one tensor-parallel rank for one micro-batch."""
    plain = layer_bytes(model, split, attention=attention, recompute=recompute)
    cross = layer_bytes(model, split, attention=attention, recompute=recompute, cross=True)
    encoded = layer_bytes(model, split, recompute=True) if model.cross_layers else 0.0  # the encoder's output, once
    return (model.layers - model.cross_layers) * plain + model.cross_layers * cross + encoded


def ends_bytes(model: MegatronModel, split: Parallelism) -> float:
    """Return what the embedding's dropout, the last norm, the head and the loss (fp32) keep of one micro-batch."""
    tokens = model.sequence / split.context * model.micro_batch
    whole = tokens * model.hidden / (split.tensor if split.sequence_parallel else 1)
    return (2 * BYTES + (1 if model.dropout else 0)) * whole + 4 * tokens * model.vocab / split.tensor


def model_flops(model: MegatronModel, *, recompute: bool = False) -> float:
    """Return the FLOPs of one micro-batch, forward and backward, of the whole model.

    Matrix products only; a multiply-add as two, backward as twice forward, attention as a full square. For GPT that is
    ``72·b·s·L·h²·(1 + s/(6h) + V/(12·h·L))`` (Narayanan et al. 2021, arXiv 2104.04473, appendix).

    Args:
        model: the model.
        recompute: whether backward runs the layers again.
    """
    tokens = model.micro_batch * model.sequence
    dense = 2 * tokens * model.hidden**2 * (12 * model.layers + 4 * model.cross_layers)
    attention = 4 * (model.layers + model.cross_layers) * tokens * model.sequence * model.hidden
    layers, head = dense + attention, 2 * tokens * model.hidden * model.vocab
    return (4 if recompute else 3) * layers + 3 * head
