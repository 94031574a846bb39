"""A HybridModel of Megatron-LM's main branch: the rows' trainings, with and without offloading, on another model."""

from __future__ import annotations

from typing import Any
from unittest import mock

from actoffload.integrations.megatron.pretrain_gpt import CausalAttention, Norm, cpu_stands_in_for_cuda
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from tests.integration.megatron_found import Found
from tests.integration.processes import main
from tests.integration.workers import megatron

PATTERN = "*-*-"
"""Attention and MLP layers in turn. Mamba layers and gated ones need a GPU."""


def make_chunks(config: Any, seq: int, **_: Any) -> list[DistributedDataParallel]:
    """Chunks like the example's, of layers that are either attention or an MLP."""
    parts = get_gpt_layer_local_spec().submodules
    parts.self_attention.submodules.core_attention = CausalAttention
    attention = TransformerLayerSubmodules(
        input_layernorm=Norm, self_attention=parts.self_attention, self_attn_bda=parts.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=Norm, mlp=parts.mlp, mlp_bda=parts.mlp_bda)
    layers = HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
    )
    with mock.patch("megatron.core.models.hybrid.hybrid_block.TENorm", Norm):  # the last one
        model = HybridModel(
            config,
            ModuleSpec(HybridStack, submodules=layers),
            vocab_size=256,
            max_sequence_length=seq,
            hybrid_layer_pattern=PATTERN,
            position_embedding_type="learned_absolute",
        )
    return [DistributedDataParallel(config, DistributedDataParallelConfig(), model)]


def compared() -> Found:
    """Both runs."""
    with cpu_stands_in_for_cuda(), mock.patch.object(megatron, "make_chunks", make_chunks):
        return megatron.compare("hybrid", megatron.Row("--microbatches 2", megatron.DROPOUT))


if __name__ == "__main__":
    main(compared)
