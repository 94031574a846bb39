"""What the GPU suite measures: Llama's layers at 8k and 32k tokens, a small model, LoRA, and SSDTrain's shapes.

Every case fits a device of 78 GiB in every mode; `benchmarks.gpu_needs` counts that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

VOCAB = {"gpt2": 50304, "bert": 30592, "t5": 32128}
GOALS = (
    *("recompute", "checkpointed, ours at equal memory", "default", "TRL"),  # what a README shows
    *("recompute's peak", "selective", "save_on_cpu"),
    *("host", "budget 35 %", "nvme"),
)
"""The modes that a goal or a verdict is about: those of every case are run before any other mode."""
CODED = ("checkpointed, no codec", "budget 35 %, exact")
EVERYTHING = (*GOALS, *CODED, "host, all", "tiered")
PAPER = ("recompute", "host", "default", "selective", "TRL")
CHECKPOINTED = ("checkpointed, ours at equal memory", "recompute + host", "recompute + nvme")


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One workload and the modes that it is run in.

    Attributes:
        name: for tables.
        spec: ``model``, ``batch``, ``dtype`` and sizes for `benchmarks.workloads.build`.
        modes: after the reference, the most wanted first.
        reference: the mode that every other one is compared with; ``keep`` would not fit where it is ``recompute``.
        ssdtrain: whether the goals for SSDTrain's shapes apply.
        optimizer: a step of AdamW is measured as well, whose states are there all the time.
    """

    name: str
    spec: dict[str, Any] = field(hash=False)
    modes: tuple[str, ...] = GOALS
    reference: str = "keep"
    ssdtrain: bool = False
    optimizer: bool = True


def cases(tiny: bool) -> list[GpuCase]:
    """All cases, the most wanted first, as a run may be short of time; with ``tiny`` the same ones in small."""
    llama = {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000}
    small = {"hidden": 2048, "inner": 8192, "heads": 32, "kv_heads": 8, "vocab": 128256, "layers": 16, "seq": 2048}
    qwen = {"hidden": 3584, "inner": 18944, "heads": 28, "kv_heads": 4, "vocab": 32000, "layers": 28, "seq": 4096}
    # Half or an eighth of the layers of a Llama of 8 billion parameters: as few as fit the device, and as many as peers
    # that pin whatever is saved can hold in the memory of a machine with 128 GiB. Short steps come first.
    found = [
        _case("llama, 8k tokens", "llama", 1, llama | {"layers": 16, "seq": 8192}, modes=EVERYTHING),
        _case("1B, 2k tokens", "llama", 1, small),
        _case("qwen, LoRA", "qwen2", 1, qwen | {"lora": 16}, modes=(*GOALS, *CODED)),
        _case("llama, 32k tokens", "llama", 1, llama | {"layers": 4, "seq": 32768}),
        _paper("gpt2", 12288, 3, EVERYTHING),
        _paper("bert", 12288, 3),
        _paper("t5", 12288, 3),
        _case(
            "llama, 32k tokens, checkpointed",
            *("llama", 1, llama | {"layers": 16, "seq": 32768}),
            modes=CHECKPOINTED,
            reference="recompute",
        ),
        *(_paper(model, hidden, layers, PAPER) for hidden, layers in ((8192, 4), (16384, 2)) for model in VOCAB),
    ]
    return [replace(case, spec=_in_small(case.spec)) for case in found] if tiny else found


def _case(name: str, model: str, batch: int, sizes: dict[str, int], **more: Any) -> GpuCase:
    return GpuCase(name=name, spec={"model": model, "batch": batch, "dtype": "bfloat16", "sizes": sizes}, **more)


def _paper(model: str, hidden: int, layers: int, modes: tuple[str, ...] = GOALS) -> GpuCase:
    """One of SSDTrain's: sequences of 1024 tokens, batch 16, heads of 128, bf16; no room is left for AdamW's states."""
    sizes = {"hidden": hidden, "layers": layers, "seq": 1024, "vocab": VOCAB[model], "head_width": 128}
    return _case(f"{model}, {hidden} × {layers}", model, 16, sizes, modes=modes, ssdtrain=True, optimizer=False)


def _in_small(spec: dict[str, Any]) -> dict[str, Any]:
    tiny = {"hidden": 128, "layers": 4, "seq": 128, "vocab": 64, "head_width": 32}
    tiny |= {"inner": 256, "heads": 4, "kv_heads": 2, "lora": 4}
    sizes = {name: tiny.get(name, size) for name, size in spec["sizes"].items()}
    return spec | {"batch": 4, "dtype": "float32", "sizes": sizes}
