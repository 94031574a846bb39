"""Tiny Transformers models with random weights, by name: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 96


def sized(size: Any, names: str) -> dict[str, Any]:
    """This size for each of the names."""
    return dict.fromkeys(names.split(), size)


COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "use_cache": False}
COMMON |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPOUT = sized(0.1, "attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob")
DROPOUT |= sized(0.1, "resid_pdrop embd_pdrop attn_pdrop dropout dropout_rate")
ENCODER_DECODER = {"d_model": 32, "d_kv": 8, "decoder_start_token_id": 0}
ENCODER_DECODER |= sized(2, "encoder_layers decoder_layers num_layers")
ENCODER_DECODER |= sized(4, "encoder_attention_heads decoder_attention_heads num_heads")
ENCODER_DECODER |= sized(48, "encoder_ffn_dim decoder_ffn_dim d_ff")
EXPERTS = sized(4, "num_experts num_local_experts") | {"num_experts_per_tok": 2}
EXPERTS |= sized(16, "moe_intermediate_size shared_expert_intermediate_size")
LATENT = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
LATENT |= sized(8, "q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim")
LINEAR = sized(2, "linear_num_key_heads linear_num_value_heads") | sized(8, "linear_key_head_dim linear_value_head_dim")
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}


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


def _named(kind: str, names: str, sizes: dict[str, Any] | None = None) -> list[Architecture]:
    return [Architecture(name, kind, sizes or {}) for name in names.split()]


ARCHITECTURES = [
    *_named("causal", "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox opt bloom mpt"),
    *_named("causal", "stablelm starcoder2 olmo olmo2 cohere granite persimmon xglm biogpt glm nemotron openai-gpt"),
    *_named("causal", "mamba falcon_mamba recurrent_gemma rwkv xlstm lfm2"),
    *_named("masked", "bert roberta albert distilbert electra deberta deberta-v2 mpnet fnet roformer modernbert"),
    *_named("seq2seq", "t5 bart mbart pegasus marian m2m_100 umt5 plbart longt5 switch_transformers nllb-moe"),
    Architecture("falcon", "causal", {"head_dim": None}),
    *_named("causal", "mixtral qwen2_moe qwen3_moe olmoe granitemoe gpt_oss", EXPERTS),
    Architecture("deepseek_v3", "causal", EXPERTS | LATENT | {"head_dim": None}),
    Architecture("qwen3_next", "causal", EXPERTS | LINEAR),
    Architecture("jamba", "causal", EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1}),
    Architecture("mamba2", "causal", {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
    Architecture("vit", "image", {"image_size": 16, "patch_size": 4, "num_labels": 2}),
    Architecture("convnext", "image", {"image_size": 16, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
]
