"""Named models, GPUs and drives for `estimate`, each number with its source; *recalled* means: check before quoting.

Megatron-LM's runs are those of Korthikanti et al. 2022 (arXiv 2205.05198): shapes and splits of Table 3, MFU of Table 5
(as NVIDIA/Megatron-LM's README repeats it) on A100 80 GB. All others are configurations of Transformers, whose saved
bytes are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ConfigError
from ..storage.endurance import Drive, bytes_of_dwpd
from .megatron import MegatronModel, Parallelism

TB = 10**12
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CountedModel:
    """A model of Transformers: its type, what differs from the type's default configuration, and the micro-batch."""

    model_type: str
    config: Mapping[str, Any]
    sequence: int
    micro_batch: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A model, its split, and what it is known to reach.

    Attributes:
        model: the model and its micro-batch, by Megatron-LM's formulas or to be counted.
        split: how a step is split over GPUs.
        gpu: name of the GPU that it ran on, or that suits it.
        source: where the numbers are from.
        utilisation: published MFU; None leaves the GPU's default.
    """

    model: MegatronModel | CountedModel
    split: Parallelism
    gpu: str
    source: str
    utilisation: float | None = None


@dataclass(frozen=True)
class GpuPreset:
    """A GPU and its link to the host. Rates in FLOP/s and bytes a second, one way."""

    peak_flops: float
    utilisation: float
    link_bytes_per_s: float
    source: str


_PCIE4 = 0.8 * 16e9 * 16 * 128 / 130 / 8
"""One way of 16 lanes: 16 GT/s, line code 128/130, and the share of 0.8 that pinned copies reach, which is recalled."""
_PCIE5 = 2 * _PCIE4
_C2C = 0.8 * 450e9
"""NVLink-C2C: 900 GB/s both ways together (Transformer Engine's documentation); 0.8 of it as for PCIe, recalled."""

LINK_SOURCE = "the link at 0.8 of its line rate (recalled, not measured)"
_A100 = f"dense bf16 of NVIDIA's data sheet; MFU as Megatron-LM's; {LINK_SOURCE}"
_HOPPER = f"dense bf16 of NVIDIA's data sheet; MFU recalled; {LINK_SOURCE}"
GPUS: dict[str, GpuPreset] = {
    "a100-pcie": GpuPreset(312e12, 0.5, _PCIE4, _A100),
    "a100-sxm": GpuPreset(312e12, 0.5, _PCIE4, _A100),
    "h100-sxm": GpuPreset(989e12, 0.4, _PCIE5, _HOPPER),
    "h200-sxm": GpuPreset(989e12, 0.4, _PCIE5, _HOPPER),
    "gh200": GpuPreset(989e12, 0.4, _C2C, _HOPPER),
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
_COUNTED = "counted in Transformers' model on meta tensors; configuration recalled"


def _megatron(
    sizes: tuple[int, int, int], micro_batch: int, *, pipeline: int, micro_batches: int, interleave: int, mfu: float
) -> ModelPreset:
    layers, hidden, heads = sizes
    model = MegatronModel(
        layers=layers, hidden=hidden, heads=heads, sequence=2048, micro_batch=micro_batch, vocab=51_200
    )
    split = Parallelism(
        tensor=8, sequence_parallel=True, pipeline=pipeline, interleave=interleave, micro_batches=micro_batches
    )
    return ModelPreset(model=model, split=split, gpu="a100-sxm", source=_MEGATRON, utilisation=mfu)


def _counted(
    model_type: str,
    config: Mapping[str, Any],
    *,
    sequence: int,
    micro_batch: int = 1,
    split: Parallelism | None = None,
) -> ModelPreset:
    model = CountedModel(model_type=model_type, config=config, sequence=sequence, micro_batch=micro_batch)
    return ModelPreset(model=model, split=split or Parallelism(), gpu="h100-sxm", source=_COUNTED)


_GPT2_XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5_LARGE = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "dropout_rate": 0.0}
_T5_TOKENS = {"decoder_start_token_id": 0, "pad_token_id": 0}


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
_QWEN3_8B = {**_sizes(36, 4096, 12_288, 32, 8, 151_936), "head_dim": 128}
_QWEN3_30B = {**_sizes(48, 2048, 6144, 32, 4, 151_936), "head_dim": 128}
_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_GPT_OSS_20B = {**_sizes(24, 2880, 2880, 64, 8, 201_088), "num_local_experts": 32, "num_experts_per_tok": 4}
MODELS: dict[str, ModelPreset] = {
    "megatron-22b": _megatron((48, 6144, 64), 4, pipeline=1, micro_batches=1, interleave=1, mfu=0.415),
    "gpt3-175b": _megatron((96, 12288, 96), 1, pipeline=8, micro_batches=64, interleave=3, mfu=0.514),
    "megatron-530b": _megatron((105, 20480, 128), 1, pipeline=35, micro_batches=280, interleave=3, mfu=0.560),
    "megatron-1t": _megatron((128, 25600, 160), 1, pipeline=64, micro_batches=512, interleave=1, mfu=0.563),
    "gpt2-xl": _counted("gpt2", _GPT2_XL, sequence=1024, micro_batch=8),
    "t5-large": _counted("t5", _T5_LARGE | _T5_TOKENS, sequence=512, micro_batch=8),
    "llama3-8b": _counted("llama", _LLAMA_8B, sequence=8192),
    "llama3-70b": _counted("llama", _LLAMA_70B, sequence=8192, split=Parallelism(tensor=8, sequence_parallel=True)),
    "qwen3-8b": _counted("qwen3", _QWEN3_8B, sequence=8192),
    "qwen3-30b-a3b": _counted("qwen3_moe", _QWEN3_30B | _QWEN3_EXPERTS, sequence=8192),
    "gpt-oss-20b": _counted("gpt_oss", _GPT_OSS_20B, sequence=4096),
    "deepseek-v3": _counted("deepseek_v3", {}, sequence=4096),
}


def preset(field: str, name: str, known: dict[str, T]) -> T:
    """Return the preset of that name.

    Raises:
        ConfigError: there is none; lists those there are.
    """
    if name not in known:
        raise ConfigError(field, name, f"no such preset; there are {', '.join(known)}")
    return known[name]
