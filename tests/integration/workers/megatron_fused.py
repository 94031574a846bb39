"""The example as Megatron trains with APEX's kernels: weight gradients fused, and reduced during backward.

``python -m ... FLAG ... -- FLAG ...`` runs it twice in one process: with the flags before ``--``, and with all flags.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor

from tests.integration.workers.twice import SECOND, keep_group


def _accumulate(x: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
    """Add to the main gradient, as APEX's kernel does."""
    main_grad.addmm_(gradient.reshape(-1, gradient.shape[-1]).t(), x.reshape(-1, x.shape[-1]))


def _with(config: Any, **options: Any) -> Any:
    return lambda **others: config(**{**others, **options})


def main() -> None:
    fused = types.ModuleType("fused_weight_gradient_mlp_cuda")
    fused.wgrad_gemm_accum_fp32 = _accumulate  # type: ignore[attr-defined]
    sys.modules[fused.__name__] = fused
    from actoffload.integrations.megatron import pretrain_gpt
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = fused
    layers._grad_accum_fusion_available = True
    example: Any = pretrain_gpt
    example.TransformerConfig = _with(example.TransformerConfig, gradient_accumulation_fusion=True)
    example.DistributedDataParallelConfig = _with(example.DistributedDataParallelConfig, overlap_grad_reduce=True)
    end, (name, *flags) = keep_group(), sys.argv
    first, more = flags[: flags.index("--")], flags[flags.index("--") + 1 :]
    for arguments in (first, first + more):
        sys.argv = [name, *arguments]
        torch.manual_seed(0)
        example.main()
        print(SECOND, flush=True)
        destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()
    end()


if __name__ == "__main__":
    main()
