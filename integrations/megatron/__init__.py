"""Megatron-core: two lines switch offloading on in ``pretrain``, or in a loop around ``get_forward_backward_func()``.

from actoffload.integrations.megatron import add_actoffload_args, wrap_forward_step

pretrain(..., wrap_forward_step(forward_step), extra_args_provider=add_actoffload_args)  # megatron-core 0.16

args = parse_and_validate_args(extra_args_provider=add_actoffload_args)  # Megatron-LM's main branch
pretrain(..., wrap_forward_step(forward_step))
"""

from __future__ import annotations

from .arguments import add_actoffload_args
from .forward_step import OffloadedForwardStep, wrap_forward_step
from .microbatches import phases

__all__ = ["OffloadedForwardStep", "add_actoffload_args", "phases", "wrap_forward_step"]
