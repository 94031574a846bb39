"""Named models, GPUs and drives for `estimate`, each number with its source; *recalled* means: check before quoting.

Megatron-LM's runs are those of Korthikanti et al. 2022 (arXiv 2205.05198): shapes and splits of Table 3, MFU of Table 5
(as NVIDIA/Megatron-LM's README repeats it) on A100 80 GB. SSDTrain's shapes: its Figure 6 (arXiv 2408.10013).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from .errors import ConfigError
from .shapes import Family, ModelShape, Parallelism
from .wear import Drive, bytes_of_dwpd

TB = 10**12
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A model, its split, and what it is known to reach."""

    shape: ModelShape
    split: Parallelism
    gpu: str
    """Name of the GPU it ran on, or that suits it."""
    utilisation: float | None = None
    """Published MFU; None leaves the GPU's default."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuPreset:
    """A GPU and its link to the host. Rates in FLOP/s and bytes a second, one way."""

    peak_flops: float
    utilisation: float
    link_bytes_per_s: float
    price_usd: float | None = None
    source: str = ""


def pcie_bytes_per_s(transfers_per_s: float, lanes: int = 16, efficiency: float = 0.8) -> float:
    """One way of a PCIe 3.0 to 5.0 link: lanes × transfer rate × 128/130 (line code) × what packets leave.

    The efficiency of 0.8 is recalled from pinned copies on such links, not measured by this project.

    >>> round(pcie_bytes_per_s(16e9, efficiency=1.0) / 1e9, 1)
    31.5
    """
    return transfers_per_s * lanes * 128 / 130 / 8 * efficiency


PCIE4 = pcie_bytes_per_s(16e9)
PCIE5 = pcie_bytes_per_s(32e9)
C2C = 0.8 * 450e9
"""NVLink-C2C: 900 GB/s both ways together (Transformer Engine's documentation); 0.8 of it as for PCIe, recalled."""

LINK_SOURCE = "the link at 0.8 of its line rate (recalled, not measured)"
_DENSE = "dense bf16 of NVIDIA's data sheet"
GPUS: dict[str, GpuPreset] = {
    "a100-pcie": GpuPreset(
        peak_flops=312e12,
        utilisation=0.5,
        link_bytes_per_s=PCIE4,
        price_usd=10_000,
        source=f"{_DENSE}; price of SSDTrain's paper; MFU as Megatron-LM's; {LINK_SOURCE}",
    ),
    "a100-sxm": GpuPreset(
        peak_flops=312e12,
        utilisation=0.5,
        link_bytes_per_s=PCIE4,
        source=f"{_DENSE}; MFU as Megatron-LM's; {LINK_SOURCE}",
    ),
    "h100-sxm": GpuPreset(
        peak_flops=989e12, utilisation=0.4, link_bytes_per_s=PCIE5, source=f"{_DENSE}; MFU recalled; {LINK_SOURCE}"
    ),
    "h200-sxm": GpuPreset(
        peak_flops=989e12, utilisation=0.4, link_bytes_per_s=PCIE5, source=f"{_DENSE}; MFU recalled; {LINK_SOURCE}"
    ),
    "gh200": GpuPreset(
        peak_flops=989e12, utilisation=0.4, link_bytes_per_s=C2C, source=f"{_DENSE}; MFU recalled; {LINK_SOURCE}"
    ),
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


def _gpt(layers: int, hidden: int, heads: int, micro_batch: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        sequence=2048,
        micro_batch=micro_batch,
        vocab=51_200,
        dropout=True,
    )


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> ModelShape:
    return ModelShape(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        sequence=8192,
        micro_batch=1,
        vocab=128_256,
        fused_kernels=False,
    )


def _ssdtrain(family: Family, hidden: int, layers: int) -> ModelPreset:
    vocab = {"gpt": 50_257, "bert": 30_522, "t5": 32_128}.get(family, 0)
    shape = ModelShape(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=hidden // 128,
        sequence=1024,
        micro_batch=16,
        vocab=vocab,
    )
    source = "SSDTrain (arXiv 2408.10013), Figure 6: TP 2, head 128, sequence 1024, batch 16; vocabulary recalled"
    return ModelPreset(shape=shape, split=Parallelism(tensor=2), gpu="a100-pcie", source=source)


def _megatron(shape: ModelShape, pipeline: int, micro_batches: int, interleave: int, mfu: float) -> ModelPreset:
    split = Parallelism(
        tensor=8, sequence_parallel=True, pipeline=pipeline, interleave=interleave, micro_batches=micro_batches
    )
    source = "Korthikanti et al. 2022 (arXiv 2205.05198), Tables 3 and 5; flash attention in place of recomputing it"
    return ModelPreset(shape=shape, split=split, gpu="a100-sxm", utilisation=mfu, source=source)


MODELS: dict[str, ModelPreset] = {
    "megatron-22b": _megatron(_gpt(48, 6144, 64, 4), 1, 1, 1, 0.415),
    "gpt3-175b": _megatron(_gpt(96, 12288, 96, 1), 8, 64, 3, 0.514),
    "megatron-530b": _megatron(_gpt(105, 20480, 128, 1), 35, 280, 3, 0.560),
    "megatron-1t": _megatron(_gpt(128, 25600, 160, 1), 64, 512, 1, 0.563),
    "llama3-8b": ModelPreset(
        shape=_llama(32, 4096, 32, 14_336),
        split=Parallelism(),
        gpu="h100-sxm",
        source="Llama 3 8B's configuration, as Transformers runs it; sequence 8192, one sequence",
    ),
    "llama3-70b": ModelPreset(
        shape=_llama(80, 8192, 64, 28_672),
        split=Parallelism(tensor=8, sequence_parallel=True),
        gpu="h100-sxm",
        source="Llama 3 70B's configuration, as Transformers runs it; sequence 8192, one sequence, TP 8",
    ),
} | {
    f"ssdtrain-{family}-{hidden}x{layers}": _ssdtrain(family, hidden, layers)
    for family in ("gpt", "bert", "t5")
    for hidden, layers in ((8192, 4), (12288, 3), (16384, 2))
}


def preset(field: str, name: str, known: dict[str, T]) -> T:
    """The preset of that name.

    Raises:
        ConfigError: there is none; lists those there are.
    """
    if name not in known:
        raise ConfigError(field, name, f"no such preset; there are {', '.join(known)}")
    return known[name]
