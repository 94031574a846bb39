"""How a step is split over GPUs, and Megatron-LM's transformer by its published formulas: activations and FLOPs.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4): a
layer with dropout holds ``s·b·h·(34 + 5·a·s/h)`` bytes in 16 bits, of which flash attention takes away the quadratic
term; tensor parallelism leaves ``s·b·h·(10 + 24/t)``, with sequence parallelism ``s·b·h·34/t``. Every other model is
counted (`saved_bytes`); these stay as what papers were measured with, and as tensor parallelism splits unequally.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..storage.endurance import check_counts


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
    """Sizes of a GPT and of one micro-batch on one data-parallel rank; 16 bits, dropout, an MLP of 4 × ``hidden``."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    micro_batch: int
    vocab: int

    def __post_init__(self) -> None:
        check_counts(self, "layers", "hidden", "heads", "sequence", "micro_batch", "vocab")

    def elements(self, split: Parallelism) -> float:
        """Return the elements of a tensor of tokens × hidden on one context-parallel rank: s·b·h."""
        return self.sequence / split.context * self.micro_batch * self.hidden


def layer_bytes(model: MegatronModel, split: Parallelism, *, unfused: bool = False, recompute: bool = False) -> float:
    """Return the bytes that one layer leaves for backward on one GPU, for one micro-batch.

    Args:
        model: the model.
        split: how it is split.
        unfused: attention keeps its matrices, as it does without flash attention and selective recomputation.
        recompute: only the layer's input is kept.

    Raises:
        ConfigError: the heads cannot be split so.
    """
    if model.heads % split.tensor:
        raise ConfigError("tensor", split.tensor, f"must divide heads={model.heads}")
    norms_share = split.tensor if split.sequence_parallel else 1
    if recompute:
        return 2 * model.elements(split) / norms_share
    square = 5 * model.heads * model.sequence / model.hidden if unfused else 0.0
    return model.elements(split) * (10 / norms_share + (24 + square) / split.tensor)


def ends_bytes(model: MegatronModel, split: Parallelism) -> float:
    """Return what the embedding's dropout, the last norm, the head and the loss (fp32) keep of one micro-batch."""
    elements = model.elements(split)
    logits = 4 * elements * model.vocab / model.hidden / split.tensor
    return 5 * elements / (split.tensor if split.sequence_parallel else 1) + logits


def model_flops(model: MegatronModel, *, recompute: bool = False) -> float:
    """Return the FLOPs of one micro-batch, forward and backward, of the whole model.

    Matrix products only; a multiply-add as two, backward as twice forward, attention as a full square:
    ``72·b·s·L·h²·(1 + s/(6h) + V/(12·h·L))`` (Narayanan et al. 2021, arXiv 2104.04473, appendix).

    Args:
        model: the model.
        recompute: whether backward runs the layers again.
    """
    s, h = model.sequence, model.hidden
    layers = 24 * model.micro_batch * s * model.layers * h**2 * (1 + s / (6 * h))
    return (4 if recompute else 3) * layers + 6 * model.micro_batch * s * h * model.vocab
