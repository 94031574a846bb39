"""The example as Megatron trains by default where APEX's kernels are: fused gradients of weights, reduced early."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor


def _accumulate(x: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
    """As APEX's kernel."""
    main_grad.addmm_(gradient.reshape(-1, gradient.shape[-1]).t(), x.reshape(-1, x.shape[-1]))


def _with(config: Any, **options: Any) -> Any:
    return lambda **others: config(**{**others, **options})


def main() -> None:
    """Run the example."""
    fused = types.ModuleType("fused_weight_gradient_mlp_cuda")
    fused.wgrad_gemm_accum_fp32 = _accumulate  # type: ignore[attr-defined]
    sys.modules[fused.__name__] = fused
    from actoffload.integrations.megatron import pretrain_gpt
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = fused
    layers._grad_accum_fusion_available = True
    example: Any = pretrain_gpt
    example.TransformerConfig = _with(example.TransformerConfig, gradient_accumulation_fusion=True)
    example.DistributedDataParallelConfig = _with(example.DistributedDataParallelConfig, overlap_grad_reduce=True)
    torch.manual_seed(0)
    example.main()


if __name__ == "__main__":
    main()
