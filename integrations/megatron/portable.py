"""What a GPT of megatron-core needs to run without CUDA, and without the packages that exist for CUDA only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by PyTorch's own kernel, which runs on every device (Megatron's own needs CUDA)."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        self.dropout: float = config.attention_dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Query, key and value: (sequence, batch, heads, head width). Returns (sequence, batch, heads × head width)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return out.permute(2, 0, 1, 3).flatten(2)


class Norm(nn.LayerNorm):
    """Layer norm for sequence parallelism without CUDA-only packages: its gradients are summed over the ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _CpuForCuda(TorchFunctionMode):
    """Makes on the CPU what is asked for on ``"cuda"``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:
            return func(*args)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


@contextlib.contextmanager
def cpu_stands_in_for_cuda() -> Iterator[None]:
    """Let megatron-core run where there is no CUDA: it names the device "cuda" in its schedules and its buffers.

    Inside, ``device="cuda"`` means the CPU, and what would fail without a device answers for it: the state of its
    random numbers is the CPU's, which Megatron's recomputing saves and restores anyway.
    """
    cuda: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
    }
    numbers: dict[str, Any] = {
        "_get_cuda_rng_state": lambda **_: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, **_: None,
    }
    random = "megatron.core.tensor_parallel.random"
    with mock.patch.multiple("torch.cuda", **cuda), mock.patch.multiple(random, **numbers), _CpuForCuda():
        yield
