"""What the GPU suite measures: SSDTrain's shapes, a Llama at 8k tokens with and without checkpoints, and tiny ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB = {"gpt2": 50304, "bert": 30592, "t5": 32128}
CORE = ("recompute", "host", "default", "TRL")
MORE = ("nvme", "save_on_cpu", "budget 35 %", "host, all", "tiered", "Megatron", "recompute + save_on_cpu")
EVERYTHING = (*CORE, *MORE)
CHECKPOINTED = ("recompute + host", "recompute + save_on_cpu", "recompute + nvme")
TINY = ("recompute", "default", "nvme, all", "tiered", "budget 35 %", "save_on_cpu", "TRL")


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One workload and the modes that it is run in.

    Attributes:
        name: for tables.
        spec: ``model``, ``batch``, ``dtype`` and sizes for `benchmarks.workloads.build`.
        modes: after the reference, the most wanted first.
        reference: the mode that every other one is compared with; ``keep`` would not fit where it is ``recompute``.
        ssdtrain: whether the goals for SSDTrain's shapes apply.
    """

    name: str
    spec: dict[str, Any] = field(hash=False)
    modes: tuple[str, ...]
    reference: str = "keep"
    ssdtrain: bool = False


def cases(tiny: bool) -> list[GpuCase]:
    """All cases, the most wanted first, as a run may be short of time."""
    if tiny:
        return _tiny()
    return [
        _paper("gpt2", 12288, 3, EVERYTHING),
        _paper("bert", 12288, 3, CORE),
        _paper("t5", 12288, 3, CORE),
        _llama("llama", batch=1, modes=(*EVERYTHING, "recompute + host")),
        _llama("llama, checkpointed", batch=4, modes=CHECKPOINTED, reference="recompute"),
        *(_paper(model, hidden, layers, CORE) for hidden, layers in ((8192, 4), (16384, 2)) for model in VOCAB),
    ]


def _paper(model: str, hidden: int, layers: int, modes: tuple[str, ...]) -> GpuCase:
    """One of SSDTrain's: sequences of 1024 tokens, batch 16, heads of 128, bf16."""
    sizes = {"hidden": hidden, "layers": layers, "seq": 1024, "vocab": VOCAB[model], "head_width": 128}
    spec = {"model": model, "batch": 16, "dtype": "bfloat16", "sizes": sizes}
    return GpuCase(name=f"{model} {hidden} × {layers}", spec=spec, modes=modes, ssdtrain=True)


def _llama(name: str, *, batch: int, modes: tuple[str, ...], reference: str = "keep") -> GpuCase:
    """Half of the layers of a Llama of 8 billion parameters, sequences of 8192 tokens, bf16.

    Half of them, so that peers that pin whatever is saved stay within the memory of a machine with 128 GiB.
    """
    sizes = {"hidden": 4096, "layers": 16, "inner": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000, "seq": 8192}
    spec = {"model": "llama", "batch": batch, "dtype": "bfloat16", "sizes": sizes}
    return GpuCase(name=name, spec=spec, modes=modes, reference=reference)


def _tiny() -> list[GpuCase]:
    language = {"hidden": 128, "layers": 2, "seq": 128, "vocab": 64, "head_width": 32}
    small = {"hidden": 128, "layers": 2, "inner": 256, "heads": 4, "kv_heads": 2, "vocab": 64, "seq": 256}
    shapes: list[tuple[str, dict[str, int], tuple[str, ...], str]] = [
        ("gpt2", language, TINY, "keep"),
        ("t5", language, ("default",), "keep"),
        ("llama", small, CHECKPOINTED[1:], "recompute"),
    ]
    return [
        GpuCase(
            name=f"tiny {model}" if reference == "keep" else f"tiny {model}, checkpointed",
            spec={"model": model, "batch": 4, "dtype": "float32", "sizes": sizes},
            modes=modes,
            reference=reference,
        )
        for model, sizes, modes, reference in shapes
    ]
