"""Tiny Transformers models with random weights, by name: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 96

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
DROPOUT: dict[str, Any] = dict.fromkeys(
    (
        "attention_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "dropout",
        "dropout_rate",
    ),
    0.1,
)
ENCODER_DECODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 8,
    "d_ff": 48,
    "decoder_start_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}


@dataclass(frozen=True)
class Architecture:
    """How to build a model: ``kind`` is the head, ``sizes`` are added to the common ones; a None takes a size away."""

    name: str
    kind: str
    sizes: dict[str, Any] = field(default_factory=dict)
    dropout: bool = True

    def build(self) -> nn.Module:
        """The model, in training mode, with the same weights each time."""
        sizes = COMMON | (DROPOUT if self.dropout else {}) | (ENCODER_DECODER if self.kind == "seq2seq" else {})
        sizes = {name: value for name, value in (sizes | self.sizes).items() if value is not None}
        config = transformers.AutoConfig.for_model(self.name, **sizes)
        torch.manual_seed(0)
        model: nn.Module = HEADS[self.kind].from_config(config)
        return model.train()

    def batch(self) -> dict[str, Tensor]:
        """The same batch each time."""
        torch.manual_seed(1)
        if self.kind == "image":
            return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
        tokens = torch.randint(3, VOCABULARY, (2, 16))
        return {"input_ids": tokens, "labels": tokens}


HEADS: dict[str, Any] = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "image": transformers.AutoModelForImageClassification,
}


def _plain(kind: str, names: str) -> list[Architecture]:
    return [Architecture(name, kind) for name in names.split()]


ARCHITECTURES = [
    *_plain("causal", "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox opt bloom mpt"),
    *_plain("causal", "stablelm starcoder2 olmo olmo2 cohere granite persimmon xglm biogpt glm nemotron openai-gpt"),
    *_plain("causal", "mamba falcon_mamba recurrent_gemma rwkv xlstm lfm2"),
    *_plain("masked", "bert roberta albert distilbert electra deberta deberta-v2 mpnet fnet roformer modernbert"),
    *_plain("seq2seq", "t5 bart mbart pegasus marian m2m_100 umt5 plbart longt5 switch_transformers nllb-moe"),
    Architecture("falcon", "causal", {"head_dim": None}),
    Architecture("mixtral", "causal", EXPERTS),
    Architecture("qwen2_moe", "causal", EXPERTS),
    Architecture("qwen3_moe", "causal", EXPERTS),
    Architecture("olmoe", "causal", EXPERTS),
    Architecture("granitemoe", "causal", EXPERTS),
    Architecture("gpt_oss", "causal", EXPERTS),
    Architecture("deepseek_v3", "causal", EXPERTS | LATENT | {"head_dim": None}),
    Architecture("qwen3_next", "causal", EXPERTS | LINEAR),
    Architecture("jamba", "causal", EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1}),
    Architecture("mamba2", "causal", {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
    Architecture("vit", "image", {"image_size": 16, "patch_size": 4, "num_labels": 2}),
    Architecture("convnext", "image", {"image_size": 16, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
]
