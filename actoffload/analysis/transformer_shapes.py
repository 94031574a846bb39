"""A transformer on paper: its shape, how it is split over GPUs, the bytes autograd saves for it, and its FLOPs.

The inventory follows what autograd really saves, tensor by tensor, and agrees term by term with Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4): a layer of Megatron-LM
with dropout holds ``s·b·h·(34 + 5·a·s/h)`` bytes in 16 bits, of which flash attention or selective recomputation takes
away the quadratic term, and tensor parallelism leaves ``s·b·h·(10 + 24/t)``, with sequence parallelism ``s·b·h·34/t``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError
from ..storage.endurance import check_counts, check_positive

Family = Literal["gpt", "bert", "t5", "llama"]
Attention = Literal["flash", "unfused"]
Recompute = Literal["none", "selective", "full"]

FP32_BYTES = 4
"""Statistics of norms and attention, and what an unfused RMSNorm computes in."""
MASK_BYTES = 1
"""An element of a dropout mask on an accelerator (a CPU keeps it in the type of the activations)."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a transformer and of one micro-batch on one data-parallel rank."""

    layers: int
    """Blocks; of T5, encoder and decoder together."""
    hidden: int
    heads: int
    sequence: int
    """Tokens of a sequence; of T5, of the encoder's and of the decoder's."""
    micro_batch: int
    """Sequences of a micro-batch."""
    vocab: int
    family: Family = "gpt"
    """``gpt`` and ``bert``: the same layer; ``t5``: half of the layers also attend to the encoder; ``llama``: RMSNorm
    and a gated MLP."""
    kv_heads: int | None = None
    """Heads of keys and values; as many as ``heads`` unless given."""
    head_dim: int | None = None
    """``hidden / heads`` unless given."""
    ffn: int | None = None
    """Width of the MLP; 4 × ``hidden`` unless given, and to be given where it is gated."""
    dtype_bytes: int = 2
    """Bytes of an activation's element."""
    logit_bytes: int = FP32_BYTES
    """Bytes of an element of what the loss keeps of the logits; Megatron-LM and Transformers compute it in fp32."""
    attention: Attention = "flash"
    """``flash``: output and log-sum-exp are kept; ``unfused``: the sequence × sequence matrices are."""
    dropout: bool = False
    """Dropout after attention and MLP (and, unfused, on the attention's matrix)."""
    fused_kernels: bool = True
    """RMSNorm and the gated activation in one kernel each (Megatron-LM, Transformer Engine, Liger). Plain PyTorch, as
    Transformers runs Llama, keeps an fp32 copy and the normed tensor of each RMSNorm, and four tensors of SwiGLU."""

    def __post_init__(self) -> None:
        check_counts(self, "layers", "hidden", "heads", "sequence", "micro_batch", "vocab", "kv_heads", "head_dim")
        check_counts(self, "ffn", "dtype_bytes", "logit_bytes")
        _choice("family", self.family, get_args(Family))
        _choice("attention", self.attention, get_args(Attention))
        if self.head_dim is None and self.hidden % self.heads:
            raise ConfigError("heads", self.heads, f"must divide hidden={self.hidden}; or give head_dim")
        if self.heads % self.key_value_heads:
            raise ConfigError("kv_heads", self.kv_heads, f"must divide heads={self.heads}")
        if self.ffn is None and self.is_gated:
            raise ConfigError("ffn", None, "a gated MLP has no customary width; give it")

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has two projections up, multiplied (SwiGLU)."""
        return self.family == "llama"

    @property
    def ffn_width(self) -> int:
        """Width of the MLP."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def cross_layers(self) -> int:
        """Layers that also attend to the encoder; of T5 half of them, rounded down, as in SSDTrain."""
        return self.layers // 2 if self.family == "t5" else 0


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
    """Ranks that a sequence is split over; needs flash attention."""
    data: int = 1
    micro_batches: int = 1
    """Micro-batches of a step and data-parallel rank."""
    in_flight: float | None = None
    """Micro-batches whose activations the fullest stage holds at once. Default: those of 1F1B."""

    def __post_init__(self) -> None:
        check_counts(self, "tensor", "pipeline", "interleave", "context", "data", "micro_batches")
        check_positive(self, "in_flight")

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
        if self.in_flight is not None:
            return self.in_flight
        chunks = (self.pipeline - 1) / (self.pipeline * self.interleave) if self.interleave > 1 else 0.0
        return min(self.micro_batches, self.pipeline * (1 + chunks))


def check_fit(shape: ModelShape, split: Parallelism) -> None:
    """Check that the shape can be split so.

    Raises:
        ConfigError: it cannot; names the field.
    """
    if shape.heads % split.tensor:
        raise ConfigError("tensor", split.tensor, f"must divide heads={shape.heads}")
    if shape.layers % (split.pipeline * split.interleave):
        stages = "pipeline × interleave" if split.interleave > 1 else "it"
        raise ConfigError("pipeline", split.pipeline, f"{stages} must divide layers={shape.layers}")
    if split.context > 1 and shape.attention != "flash":
        raise ConfigError("context", split.context, "context parallelism needs attention='flash'")


def layer_inventory(
    shape: ModelShape, split: Parallelism, recompute: Recompute = "none", *, cross: bool = False
) -> dict[str, float]:
    """Return the bytes that one layer leaves for backward on one GPU, by tensor, for one micro-batch.

    Args:
        shape: the model.
        split: how it is split.
        recompute: ``full`` keeps the layer's input only; ``selective`` recomputes softmax, its dropout and its product.
        cross: a decoder layer, with cross-attention.
    """
    elements = _split_elements(shape, split)
    if recompute == "full":
        return {"layer input": elements * shape.dtype_bytes}
    mask = {"dropout mask": elements * MASK_BYTES} if shape.dropout else {}
    parts = {"norm 1": _norm(shape, split), "attention": _attention(shape, split, recompute) | mask}
    if cross:
        parts["norm x"] = _norm(shape, split)
        parts["cross-attention"] = _attention(shape, split, recompute) | mask
    parts |= {"norm 2": _norm(shape, split), "mlp": _mlp(shape, split) | mask}
    return {f"{part}: {name}": nbytes for part, saved in parts.items() for name, nbytes in saved.items()}


def layers_bytes(shape: ModelShape, split: Parallelism, recompute: Recompute = "none") -> float:
    """Return the bytes that a pipeline stage's layers leave on one GPU for one micro-batch; stages are taken as equal.

    Raises:
        ConfigError: the shape cannot be split so.
    """
    check_fit(shape, split)
    cross = shape.cross_layers
    total = (shape.layers - cross) * sum(layer_inventory(shape, split, recompute).values())
    if cross:
        total += cross * sum(layer_inventory(shape, split, recompute, cross=True).values())
        total += _split_elements(shape, split) * shape.dtype_bytes  # the encoder's output, kept once
    return total / split.pipeline


def ends_inventory(shape: ModelShape, split: Parallelism) -> dict[str, float]:
    """Return the bytes that embedding, last norm and loss leave on the GPU that has them, for one micro-batch.

    The loss's backward follows at once, so these are not worth moving and are counted apart.
    """
    saved = {f"last norm: {name}": nbytes for name, nbytes in _norm(shape, split).items()}
    saved["loss: logits"] = _tokens(shape, split) * shape.vocab * shape.logit_bytes / split.tensor
    if shape.dropout:
        saved["embedding: dropout mask"] = _split_elements(shape, split) * MASK_BYTES
    return saved


def model_flops(shape: ModelShape) -> float:
    """Return the algorithmic FLOPs of one micro-batch, forward and backward, of the whole model.

    Matrix products only, without what is recomputed; a multiply-add as two, backward as twice forward, attention as a
    full square. For GPT with an MLP of ``4h`` that is ``72·b·s·L·h²·(1 + s/(6h) + V/(12·h·L))`` (Narayanan et al. 2021,
    arXiv 2104.04473, appendix).
    """
    tokens = shape.micro_batch * shape.sequence
    width, kv_width = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
    projections = 2 * shape.hidden * width + 2 * shape.hidden * kv_width
    mlp = (3 if shape.is_gated else 2) * shape.hidden * shape.ffn_width
    dense = shape.layers * (projections + mlp) + shape.cross_layers * projections + shape.hidden * shape.vocab
    return 3 * (2 * tokens * dense + attention_flops(shape))


def attention_flops(shape: ModelShape) -> float:
    """Return the FLOPs of the two products of attention, ``4·b·s²·h`` a layer, forward only, of the whole model."""
    layers = shape.layers + shape.cross_layers
    return 4 * layers * shape.micro_batch * shape.sequence**2 * shape.heads * shape.head_width


def recomputed_flops(shape: ModelShape, recompute: Recompute) -> float:
    """Return the FLOPs that backward does again for one micro-batch of the whole model."""
    if recompute == "selective":
        return attention_flops(shape) if shape.attention == "unfused" else 0.0
    head = 6 * shape.micro_batch * shape.sequence * shape.hidden * shape.vocab
    return (model_flops(shape) - head) / 3 if recompute == "full" else 0.0


def _tokens(shape: ModelShape, split: Parallelism) -> float:
    return shape.micro_batch * shape.sequence / split.context


def _split_elements(shape: ModelShape, split: Parallelism) -> float:
    """Return the elements on one GPU of a tensor of tokens × hidden outside of the tensor-parallel parts."""
    return _tokens(shape, split) * shape.hidden / (split.tensor if split.sequence_parallel else 1)


def _norm(shape: ModelShape, split: Parallelism) -> dict[str, float]:
    """A norm's input and statistics, and its output, which the projection behind it keeps."""
    elements = _split_elements(shape, split)
    tokens, row = elements / shape.hidden, elements * shape.dtype_bytes
    if shape.family != "llama":
        return {"input": row, "mean and deviation": 2 * FP32_BYTES * tokens, "output": row}
    saved = {"input": row, "deviation": FP32_BYTES * tokens, "output": row}
    if not shape.fused_kernels:
        saved |= {"input": elements * FP32_BYTES, "normed": row}
    return saved


def _attention(shape: ModelShape, split: Parallelism, recompute: Recompute) -> dict[str, float]:
    """Queries, keys, values, the output (which the projection behind it shares) and what the product itself keeps."""
    tokens = _tokens(shape, split)
    head = tokens * shape.head_width * shape.dtype_bytes
    heads, kv_heads = shape.heads / split.tensor, max(1.0, shape.key_value_heads / split.tensor)
    saved = {"queries": heads * head, "keys and values": 2 * kv_heads * head, "output": heads * head}
    if shape.attention == "flash":
        return saved | {"log-sum-exp": tokens * heads * FP32_BYTES}
    if recompute == "selective":
        return saved
    square = heads * shape.micro_batch * shape.sequence**2
    saved["softmax"] = square * shape.dtype_bytes
    if shape.dropout:
        saved |= {"softmax mask": square * MASK_BYTES, "softmax dropped": square * shape.dtype_bytes}
    return saved


def _mlp(shape: ModelShape, split: Parallelism) -> dict[str, float]:
    """Inputs of the activation, and its output, which the projection down keeps."""
    row = _tokens(shape, split) * shape.ffn_width * shape.dtype_bytes / split.tensor
    if not shape.is_gated:
        return {"up": row, "activated": row}
    saved = {"gate": row, "up": row, "product": row}
    return saved if shape.fused_kernels else saved | {"activated gate": row}


def _choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(field, value, f"choose one of {', '.join(map(repr, choices))}")
