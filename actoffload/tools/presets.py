"""Named models, GPUs and drives for `estimate`, and published figures; *recalled* means: check before quoting.

Megatron-LM's runs are those of Korthikanti et al. 2022 (arXiv 2205.05198): shapes and splits of Table 3, MFU of Table 5
(as NVIDIA/Megatron-LM's README repeats it) on A100 80 GB. Their layers, with dropout, are the built-in GPT's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ConfigError
from ..storage.endurance import Drive, bytes_of_dwpd
from .estimates import Parallelism

TB = 10**12
GIB = 1 << 30
T = TypeVar("T")
BUILT_IN = "gpt"
"""The model type of the built-in GPT; all others are Transformers'."""


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A model, its micro-batch, its split, and what it is known to reach.

    Attributes:
        model_type: ``BUILT_IN``, or a type of Transformers.
        config: what differs from the type's default configuration.
        sequence: tokens of a sample.
        micro_batch: samples of a micro-batch.
        split: how a step is split over GPUs.
        gpu: name of the GPU that it ran on, or that suits it.
        source: where the numbers are from.
        utilisation: published MFU; None leaves the GPU's default.
    """

    model_type: str
    config: Mapping[str, Any]
    sequence: int
    micro_batch: int = 1
    split: Parallelism = field(default_factory=Parallelism)
    gpu: str = "h100-sxm"
    source: str = "counted in Transformers' model on meta tensors; configuration recalled"
    utilisation: float | None = None


@dataclass(frozen=True)
class GpuPreset:
    """A GPU and its link to the host. FLOP/s (dense, bfloat16), a share, bytes a second one way, and bytes."""

    peak_flops: float
    utilisation: float
    link_bytes_per_s: float
    memory_bytes: int
    source: str


_PCIE4 = 0.8 * 16e9 * 16 * 128 / 130 / 8
"""One way of 16 lanes: 16 GT/s, line code 128/130, and the share of 0.8 that pinned copies reach, which is recalled."""
_PCIE5 = 2 * _PCIE4
_C2C = 0.8 * 450e9
"""NVLink-C2C: 900 GB/s both ways together (Transformer Engine's documentation); 0.8 of it as for PCIe, recalled."""

LINK_SOURCE = "the link at 0.8 of its line rate (recalled, not measured)"
_A100 = f"dense bf16 of NVIDIA's data sheet; MFU as Megatron-LM's; {LINK_SOURCE}"
_HOPPER = f"dense bf16 of NVIDIA's data sheet; MFU recalled; {LINK_SOURCE}"
_GEFORCE = f"dense bf16 with float32 sums of NVIDIA's RTX Blackwell white paper; MFU recalled; {LINK_SOURCE}"
GPUS: dict[str, GpuPreset] = {
    "a100-pcie": GpuPreset(312e12, 0.5, _PCIE4, 40 * GIB, _A100),
    "a100-sxm": GpuPreset(312e12, 0.5, _PCIE4, 80 * GIB, _A100),
    "h100-sxm": GpuPreset(989e12, 0.4, _PCIE5, 80 * GIB, _HOPPER),
    "h200-sxm": GpuPreset(989e12, 0.4, _PCIE5, 140 * GIB, _HOPPER),
    "gh200": GpuPreset(989e12, 0.4, _C2C, 96 * GIB, _HOPPER),
    "rtx-3090": GpuPreset(71.2e12, 0.5, _PCIE4, 24 * GIB, _GEFORCE),
    "rtx-4090": GpuPreset(165.2e12, 0.5, _PCIE4, 24 * GIB, _GEFORCE),
    "rtx-5090": GpuPreset(209.5e12, 0.5, _PCIE5, 32 * GIB, _GEFORCE),
}

DRIVES: dict[str, Drive] = {
    "980pro-1tb": Drive(
        name="Samsung 980 PRO 1 TB",
        capacity_bytes=TB,
        rated_written_bytes=600 * TB,
        write_bytes_per_s=5.0e9,
        read_bytes_per_s=7.0e9,
        price_usd=90.0,
        source="600 TBW, 5.0 and 7.0 GB/s: Samsung's announcement, 2020; $90: SSDTrain's $360 for four",
    ),
    "p5800x-1.6tb": Drive(
        name="Intel Optane P5800X 1.6 TB",
        capacity_bytes=1_600_000_000_000,
        rated_written_bytes=bytes_of_dwpd(1_600_000_000_000, 100),
        write_bytes_per_s=6.2e9,
        read_bytes_per_s=7.2e9,
        price_usd=3823.0,
        nand=False,
        source="100 DWPD for 5 years, 7.2 GB/s, list price $3,823 of 2021: Tom's Hardware; write 6.2 GB/s recalled",
    ),
}

_MEGATRON = "Korthikanti et al. 2022 (arXiv 2205.05198), Tables 3 and 5; flash attention in place of recomputing it"
_SSDTRAIN = "SSDTrain (arXiv 2408.10013), section on evaluation: sequence 1024, heads of 128, tensor parallelism of 2"


def _megatron(
    sizes: tuple[int, int, int], micro_batch: int, *, pipeline: int, micro_batches: int, interleave: int, mfu: float
) -> ModelPreset:
    layers, width, heads = sizes
    config = {"layers": layers, "width": width, "head_width": width // heads, "vocab": 51_200, "dropout": 0.1}
    split = {"pipeline": pipeline, "interleave": interleave, "micro_batches": micro_batches}
    return ModelPreset(
        model_type=BUILT_IN,
        config=config,
        sequence=2048,
        micro_batch=micro_batch,
        split=Parallelism(tensor=8, sequence_parallel=True, **split),
        gpu="a100-sxm",
        source=_MEGATRON,
        utilisation=mfu,
    )


def _ssdtrain(width: int, layers: int) -> ModelPreset:
    config = {"layers": layers, "width": width, "head_width": 128, "vocab": 30_592, "dropout": 0.1}
    return ModelPreset(
        model_type=BUILT_IN,
        config=config,
        sequence=1024,
        micro_batch=16,
        split=Parallelism(tensor=2),
        gpu="a100-pcie",
        source=_SSDTRAIN,
    )


def _sizes(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


_LLAMA_8B = _sizes(32, 4096, 14_336, 32, 8, 128_256)
_LLAMA_70B = _sizes(80, 8192, 28_672, 64, 8, 128_256)
_QWEN3_30B = {**_sizes(48, 2048, 6144, 32, 4, 151_936), "head_dim": 128}
_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS: dict[str, ModelPreset] = {
    "megatron-22b": _megatron((48, 6144, 64), 4, pipeline=1, micro_batches=1, interleave=1, mfu=0.415),
    "gpt3-175b": _megatron((96, 12288, 96), 1, pipeline=8, micro_batches=64, interleave=3, mfu=0.514),
    "megatron-530b": _megatron((105, 20480, 128), 1, pipeline=35, micro_batches=280, interleave=3, mfu=0.560),
    "megatron-1t": _megatron((128, 25600, 160), 1, pipeline=64, micro_batches=512, interleave=1, mfu=0.563),
    "ssdtrain-8192": _ssdtrain(8192, 4),
    "ssdtrain-12288": _ssdtrain(12288, 3),
    "ssdtrain-16384": _ssdtrain(16384, 2),
    "llama3-8b": ModelPreset(model_type="llama", config=_LLAMA_8B, sequence=8192),
    "llama3-70b": ModelPreset(
        model_type="llama", config=_LLAMA_70B, sequence=8192, split=Parallelism(tensor=8, sequence_parallel=True)
    ),
    "qwen3-30b-a3b": ModelPreset(model_type="qwen3_moe", config=_QWEN3_30B | _QWEN3_EXPERTS, sequence=8192),
}


@dataclass(frozen=True)
class Published:
    """A published figure of a preset: what `Estimate` calls it, in ``unit`` of so many."""

    model: str
    figure: str
    value: float
    unit: str
    source: str


UNITS = {"s": 1.0, "GB": 1e9, "GB/s": 1e9, "GiB": float(GIB)}
_RUNS = ("megatron-22b", "gpt3-175b", "megatron-530b", "megatron-1t")
_TABLE_5 = "Korthikanti et al., Table 5"
_FORMULA = "Korthikanti et al., 34·s·b·h/t bytes a layer"
_TABLE_III = "SSDTrain, Table III, offloaded bytes (recalled: no copy was found to check them)"
PUBLISHED = (
    *(Published(m, "step_s", s, "s", _TABLE_5) for m, s in zip(_RUNS, (1.10, 13.75, 37.83, 71.49), strict=True)),
    *(
        Published(m, "activation_bytes_in_flight", gib, "GiB", _FORMULA)
        for m, gib in zip(_RUNS, (9.5625, 12.3515625, 23.076171875, 26.5625), strict=True)
    ),
    Published("gpt3-175b", "required_bytes_per_s", 12.1, "GB/s", "SSDTrain, Figure 5, the most of its runs"),
    Published("ssdtrain-8192", "activation_bytes_per_step", 10.37, "GB", _TABLE_III),
    Published("ssdtrain-12288", "activation_bytes_per_step", 12.85, "GB", _TABLE_III),
    Published("ssdtrain-16384", "activation_bytes_per_step", 11.75, "GB", _TABLE_III),
)


def preset(field: str, name: str, known: dict[str, T]) -> T:
    """Return the preset of that name.

    Raises:
        ConfigError: there is none; lists those there are.
    """
    if name not in known:
        raise ConfigError(field, name, f"no such preset; there are {', '.join(known)}")
    return known[name]
