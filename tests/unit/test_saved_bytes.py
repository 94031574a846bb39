"""Saved bytes counted on meta tensors, against an offloader's count of a real step of the same model on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader
from actoffload.autotune.blocks import find_blocks
from actoffload.errors import ConfigError
from actoffload.testing.gpt import GPTConfig
from actoffload.tools.models import build_gpt, build_transformers, configuration, unpacked_sequences
from actoffload.tools.saved_bytes import WatchedStep, call

META = torch.device("meta")
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100}
_SIZES = _HEADS | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
_BERT = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
_T5 = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
_DEEPSEEK_HEADS = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "kv_lora_rank": 32, "q_lora_rank": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": _BERT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    # Its attention adds a learned bias, for which the CPU has no fused kernel: both run it in plain operators.
    "t5": _T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "attn_implementation": "eager"},
    "llama": _SIZES,
    "qwen3": _SIZES,
    "qwen3_moe": _SIZES | _EXPERTS | {"num_experts": 8},
    "gpt_oss": _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    # Values as wide as keys: only for these has the CPU a fused kernel.
    "deepseek_v3": {name: size for name, size in _SIZES.items() if name != "head_dim"}
    | _EXPERTS
    | _DEEPSEEK_HEADS
    | {"v_head_dim": 48, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 4},
}


class Counted:
    """The bytes that a forward saves in each block, outside of blocks (``ends``) and in all."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        step = WatchedStep(model, find_blocks(model), inputs)
        with unpacked_sequences(), step.flops, step.forward():
            self.result = call(model, inputs)
        self.blocks = dict.fromkeys((run.name for run in step.blocks), 0)
        self.ends, self.flops, self.attentions = 0, step.forward_flops, step.kernels.attentions
        for one in step.saved.values():
            if one.block is None:
                self.ends += one.nbytes
            else:
                self.blocks[step.blocks[one.block].name] += one.nbytes
        self.total = self.ends + sum(self.blocks.values())


def count_family(model_type: str, dtype: torch.dtype = torch.bfloat16) -> Counted:
    config = configuration(model_type, **FAMILIES[model_type])
    made = build_transformers(config, sequence=64, dtype=dtype, device=META)
    return Counted(made.model, made.batch(2))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_meta_tensors_count_the_saved_bytes_of_a_real_step(model_type: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    # Experts run in bfloat16 alone. In it, the CPU's layer norm keeps its statistics in bfloat16, too, unlike a GPU's.
    dtype = torch.float32 if model_type in ("gpt2", "bert") else torch.bfloat16
    made = build_transformers(
        configuration(model_type, **FAMILIES[model_type]), sequence=64, dtype=dtype, device=torch.device("cpu")
    )
    batch = made.batch(2)
    with Offloader(OffloadConfig(path=str(tmp_path), policy="keep", min_bytes=1)).use(made.model) as offloader:
        loss = made.loss(batch)
    torch.autograd.backward(loss)
    seen = offloader.statistics().activation_bytes
    offloader.close()
    counted = count_family(model_type, dtype)
    assert counted.total == pytest.approx(seen, rel=0.001)
    assert len(counted.blocks) == (4 if model_type == "t5" else 2)


def test_bfloat16_halves_the_saved_bytes() -> None:
    pytest.importorskip("transformers")
    half, whole = count_family("llama"), count_family("llama", torch.float32)
    assert 0.5 < sum(half.blocks.values()) / sum(whole.blocks.values()) < 0.65, "norms and statistics stay float32"


class Attention(nn.Module):
    """One call of attention in a block, two blocks; 2 × 4 heads × 16 tokens × 8 elements."""

    def __init__(self, *, mask: bool = False, wide: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.mask, self.wide, self.dropout = mask, wide, dropout

    def forward(self, x: Tensor) -> Tensor:
        query, value = self.blocks[0](x), self.blocks[1](x)
        mask = torch.ones(16, 16, dtype=torch.bool, device=x.device) if self.mask else None
        value = torch.cat([value, value], -1) if self.wide else value
        found: Tensor = nn.functional.scaled_dot_product_attention(query, query * 2, value, attn_mask=mask)
        return nn.functional.dropout(found, self.dropout, self.training)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, 0),
        ({"mask": True}, 2 * 4 * 16 * 16 * 4 // 8),  # the mask as the kernel adds it, one for all heads
        ({"wide": True}, 2 * 2 * 4 * 16 * 8 * 4),  # values and output
        ({"dropout": 0.1}, 2 * 4 * 16 * 8),  # one byte an element
    ],
)
def test_attention_is_a_fused_kernel(options: dict[str, Any], more: int) -> None:
    with torch.device("meta"):
        model, x = Attention(**options), torch.ones(2, 4, 16, 8)
    saved = Counted(model, x)
    tensor, logsumexp = 2 * 4 * 16 * 8 * 4, 2 * 4 * 16 * 4
    assert saved.attentions == 1
    # Queries, keys, values, the output and the log-sum-exp; not the 16 × 16 matrices. Some kernels pad the last.
    assert saved.total == pytest.approx(4 * tensor + logsumexp + more, abs=2 * logsumexp)
    assert saved.total < 4 * tensor + more + 2 * 4 * 16 * 16 * 4


def test_attention_of_pytorchs_own_layers_is_a_fused_kernel() -> None:
    with META:
        model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 2, 64, batch_first=True) for _ in range(2)))
        short, long = torch.ones(1, 128, 64), torch.ones(1, 256, 64)
    once, twice = Counted(model, short), Counted(model, long)
    assert once.attentions == 2
    assert twice.blocks["1"] == pytest.approx(2 * once.blocks["1"], rel=0.01), "no matrix of tokens × tokens"


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_built_in_gpt_saves_the_bytes_that_korthikanti_counts(tensor: int) -> None:
    """A layer: s·b·h·(10 + 24/t) bytes in 16 bits; the ends: last norm and head, and the logits (arXiv 2205.05198)."""
    sizes = GPTConfig(layers=3, width=256, seq=128, dropout=0.1, tensor=tensor)
    made = build_gpt(sizes, dtype=torch.bfloat16, device=META)
    saved = Counted(made.model, made.batch(4))
    elements = 4 * sizes.seq * 256
    assert saved.blocks["stack.blocks.1"] == pytest.approx(elements * (10 + 24 / tensor), rel=0.02)
    logits = 2 * 4 * sizes.seq * sizes.vocab / tensor
    assert saved.ends == pytest.approx(4 * elements + logits, rel=0.02)
    # Narayanan et al. 2021 (2104.04473): 72·b·s·L·h²·(1 + s/(6h) + V/(12·h·L)) for forward and backward.
    formula = 72 * 4 * 128 * 3 * 256**2 * (1 + 128 / (6 * 256) + sizes.vocab / (12 * 256 * 3))
    assert 3 * tensor * saved.flops == pytest.approx(formula)


def test_experts_are_counted_in_the_flops() -> None:
    pytest.importorskip("transformers")
    saved = count_family("qwen3_moe")
    tokens, experts = 2 * 64, 3 * 2 * 128 * 96  # gate, up and down, of two experts
    dense = 2 * 128 * 128 + 2 * 128 * 64 + 8 * 128
    attention = 2 * 2 * 2 * 4 * 64 * 64 * 32
    assert saved.flops == 2 * (2 * tokens * (experts + dense) + attention) + 2 * tokens * 128 * 100


def test_a_watched_model_has_its_hooks_no_longer() -> None:
    with META:
        model, x = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), torch.ones(16, 8, requires_grad=True)
    assert Counted(model, {"input": x}).blocks == {"0": 0, "1": 16 * 4 * 4}
    assert not model[0]._forward_hooks


# -- models that a user names ------------------------------------------------------------------------------------------


def test_configurations_are_files_or_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama", "num_hidden_layers": 3}')
    assert configuration(str(file)).num_hidden_layers == 3
    assert configuration(str(tmp_path)).num_hidden_layers == 3
    assert configuration("gpt2").n_layer == 12
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"give FILE.py:FUNCTION, a config.json"):
        configuration(str(file))
    with pytest.raises(ConfigError, match=r"from_model='gpt9': give FILE.py:FUNCTION, a config.json"):
        configuration("gpt9")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install actoffload\[hf\]"):
        configuration("gpt2")
