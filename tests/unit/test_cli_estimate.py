"""``actoffload estimate``: tables, JSON without other output, options over presets, errors with a remedy."""

from __future__ import annotations

import json
import math
import sys
from functools import cache, partial
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
from actoffload.tools.on_paper import MODELS
from actoffload.tools.saved_bytes import WatchedStep, call
from tests import commands
from tests.commands import invoke

run, answer = cache(partial(invoke, "estimate")), cache(partial(commands.answer, "estimate"))
"""Several tests ask for the same."""
GPT_OF = """
import torch
from actoffload.testing.gpt import GPT, GPTConfig

def build():
    model = GPT(GPTConfig(layers={layers}, width={width}, head_width=128, seq=1024, vocab=30592, dropout=0.1))
    tokens = lambda size: torch.ones(size, 1024, dtype=torch.long)
    return model.to(torch.bfloat16), lambda size: (tokens(size), tokens(size))
"""
"""A user's file with a model of one of SSDTrain's shapes."""


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options for a GPT of two wide layers on an A100."""
    return _gpt_of(tmp_path_factory, layers=2, width=16384)


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options for half of a GPT of four layers: two A100 share it."""
    return (*_gpt_of(tmp_path_factory, layers=4, width=8192), "--tensor", "2")


def _gpt_of(folders: pytest.TempPathFactory, **sizes: int) -> tuple[str, ...]:
    file = folders.mktemp("gpt") / "shape.py"
    file.write_text(GPT_OF.format(**sizes))
    return ("--from-model", f"{file}:build", "--gpu", "a100-pcie", "--micro-batch", "16")


def test_for_a_person(two_layers: tuple[str, ...]) -> None:
    text = run(*two_layers)
    for part in (
        "shape.py:build, micro-batch 16: 2 × ",
        "memory of a GPU at its peak",
        "does NOT fit",
        "needed, each way",
        "share that hides",
        "life on rated TBW",
    ):
        assert part in text
    assert "(recalled, not measured)" in text


def test_json_holds_question_and_answer(four_layers: tuple[str, ...]) -> None:
    found = answer(*four_layers)
    assert found["hardware"]["flops_per_s"] == 156e12
    assert found["split"]["tensor"] == 2
    # 34 bytes an element in each layer: s·b·h·34/t (Korthikanti et al., arXiv 2205.05198), with dropout.
    assert found["layers_bytes"] == pytest.approx([34 * 16 * 1024 * 8192 / 2] * 4, rel=0.02)


def test_options_go_over_the_presets(two_layers: tuple[str, ...]) -> None:
    found = answer(
        *(*two_layers, "--micro-batch", "8"),
        *("--tflops", "25", "--link", "20", "--disk", "2", "--drives", "3", "--drive", "p5800x-1.6tb"),
    )
    whole = answer(*two_layers)
    assert sum(found["layers_bytes"]) == pytest.approx(sum(whole["layers_bytes"]) / 2)
    assert found["step_flops"] == pytest.approx(whole["step_flops"] / 2)
    assert found["step_s"] == pytest.approx(found["step_flops"] / 25e12)
    hardware = found["hardware"]
    assert (hardware["flops_per_s"], hardware["drives"], hardware["disk_bytes_per_s"]) == (25e12, 3, 2e9)
    assert hardware["drive"]["rated_written_bytes"] == 292 * 10**15
    assert not any("line rate" in note for note in found["notes"])


def test_memory_follows_the_gpu_and_the_optimizer(two_layers: tuple[str, ...]) -> None:
    found = answer(*two_layers, "--gpu", "rtx-4090")
    states = found["states"]
    assert "23.0 GiB for tensors" in run(*two_layers, "--gpu", "rtx-4090")
    assert states["parameters"] == pytest.approx(2 * (2 * 12 * 16384**2 + 2 * 30592 * 16384), rel=0.01)
    assert states["optimizer"] == 6 * states["parameters"]
    sgd = answer(*two_layers, "--memory", "48GiB", "--optimizer-bytes", "0")
    assert sgd["hardware"]["memory_bytes"] == 48 << 30
    assert sgd["states"]["optimizer"] == 0


def test_states_are_split_by_zero_over_data_parallel_ranks(two_layers: tuple[str, ...]) -> None:
    found = [answer(*two_layers, "--data", "8", "--zero", str(stage))["states"] for stage in range(4)]
    shares = [[nbytes / found[0][name] for name, nbytes in states.items()] for states in found]
    assert shares == [[1, 1, 1], [1, 1, 1 / 8], [1, 1 / 8, 1 / 8], [1 / 8, 1 / 8, 1 / 8]]


def test_in_host_memory_no_drive_wears_and_the_link_bounds(two_layers: tuple[str, ...]) -> None:
    disk, host = (answer(*two_layers, "--target", target, "--drives", "1") for target in ("nvme", "host"))
    assert host["fits"]["hidden"]["saved_bytes"] < disk["fits"]["hidden"]["saved_bytes"]
    assert (host["written_bytes_per_day"], host["rated_life_s"]) == (0, None)
    assert disk["rated_life_s"] * disk["written_bytes_per_day"] / 86400 == pytest.approx(600e12)
    assert disk["notes"][0].startswith("WEAR: ")
    assert not any("WEAR" in note or "drive" in note for note in host["notes"])
    assert "TBW" not in run(*two_layers, "--target", "host")


def test_hidden_moves_cost_no_time_and_the_least_memory_does(four_layers: tuple[str, ...]) -> None:
    fits = answer(*four_layers)["fits"]
    kept, hidden, least = fits["kept"], fits["hidden"], fits["least"]
    assert kept["saved_bytes"] > hidden["saved_bytes"] > least["saved_bytes"] > 0
    assert kept["step_s"] <= hidden["step_s"] <= 1.01 * kept["step_s"] < least["step_s"]
    assert kept["micro_batch"] <= hidden["micro_batch"] <= least["micro_batch"]


def test_adapters_leave_the_states_of_the_rest_out(two_layers: tuple[str, ...]) -> None:
    whole, some = (answer(*two_layers, *more) for more in ((), ("--adapters", "16")))
    trained = some["states"]["gradients"] / 4  # adapters are in float32
    linears = 4 * 16384 * 16 + (16384 + 3 * 16384) * 16 + 2 * (16384 + 4 * 16384) * 16 - 2 * 16384 * 16
    assert trained == pytest.approx(2 * linears, rel=0.2), "two layers; one adapter for queries, keys and values"
    assert some["states"]["parameters"] == whole["states"]["parameters"] + 4 * trained
    assert some["states"]["optimizer"] == 8 * trained
    # In each of two layers the inputs of four linear layers are saved in float32, by the adapters.
    more = 2 * (4 - 2) * 16 * 1024 * 16384 * (1 + 1 + 1 + 4)
    assert sum(some["layers_bytes"]) == pytest.approx(sum(whole["layers_bytes"]) + more, rel=0.05)


@pytest.mark.parametrize(
    ("fitting", "reported"),
    [
        ("kept", "It fits as it is, up to micro-batch 16; with offloading up to "),
        ("hidden", "It fits with offloading, and no step is longer"),
        ("least", "so steps wait"),
        ("", "Try --adapters 16; or --zero 3 --data N over N GPUs; or --gpu a100-pcie."),
    ],
)
def test_the_first_line_has_the_advice(four_layers: tuple[str, ...], fitting: str, reported: str) -> None:
    found, memory = answer(*four_layers), 24 << 30
    if fitting:  # a GPU that is just large enough, with a GiB for all that is no tensor
        memory = math.ceil(sum(found["states"].values())) + found["fits"][fitting]["saved_bytes"] + (1 << 30)
    first, second, *_ = run(*four_layers, "--memory", str(memory)).splitlines()
    assert reported in first
    assert second.startswith("WEAR: "), "the warning of wear precedes the tables"


def test_presets_are_listed() -> None:
    listed = answer("--presets")
    assert {"--model", "--gpu", "--drive"} == {entry["option"] for entry in listed}
    assert all(entry["source"] for entry in listed)
    assert "qwen3-30b-a3b" in run("--presets")


@pytest.mark.thorough  # `test_readme` counts the first; the families below have the others' experts
@pytest.mark.parametrize("model", MODELS)
def test_presets_of_transformers_are_counted(model: str) -> None:
    """With the layers of the real model, and a short sequence, because that is quick."""
    pytest.importorskip("transformers")
    found = answer("--model", model, "--sequence", "128")
    assert len(found["layers_bytes"]) in (32, 48, 80)
    assert found["required_bytes_per_s"] > 0
    assert "Bytes by counting on meta tensors, with flash attention." in found["notes"]


def test_a_config_json_is_counted_with_the_batch_that_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 64}))
    short, long = (answer("--from-model", str(file), "--sequence", n)["fits"]["kept"] for n in ("1024", "2048"))
    assert long["saved_bytes"] == pytest.approx(2 * short["saved_bytes"], rel=0.001)
    assert "llama, sequence 2048, micro-batch 1: 2 × " in run("--from-model", str(file))


def test_the_documented_model_is_counted_as_by_try(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    file = tmp_path / "mine.py"
    file.write_text(page.partition("```python\n")[2].partition("```")[0])
    found = answer("--from-model", f"{file}:build", "--micro-batch", "64")
    assert len(found["layers_bytes"]) == 4
    assert min(found["layers_bytes"]) > 64 * 128 * 256 * 4
    assert found["hardware"]["name"] == "rtx-4090"
    tried = commands.answer("try", f"{file}:build", "--no-measure", "--batch", "64", "--gpu", "rtx-4090")
    assert found["fits"]["kept"]["saved_bytes"] == tried["kept_bytes"]


TWO_LINEAR = """
import torch

def build(trained=True):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
    return model.requires_grad_(trained), lambda size: torch.ones(size, 8)

def frozen():
    return build(trained=False)
"""


def test_a_model_needs_no_loss_and_may_save_nothing_that_can_move(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TWO_LINEAR)
    found = answer("--from-model", f"{file}:build")
    assert (found["activation_bytes_per_step"], found["share_hidden"], found["rated_life_s"]) == (0, 0, None)
    assert found["fits"]["kept"] == found["fits"]["least"]
    assert found["small_bytes"] == found["fits"]["kept"]["saved_bytes"] > 0
    refused = run("--from-model", f"{file}:frozen", status=2)
    assert "its loss has no gradient: train some of its parameters" in refused


# -- bytes counted on meta tensors -------------------------------------------------------------------------------------


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


def test_the_built_in_gpt_saves_the_bytes_that_korthikanti_counts() -> None:
    """A layer: 34·s·b·h bytes in 16 bits; the ends: last norm and head, and the logits (arXiv 2205.05198)."""
    sizes = GPTConfig(layers=3, width=256, seq=128, dropout=0.1)
    made = build_gpt(sizes, dtype=torch.bfloat16, device=META)
    saved = Counted(made.model, made.batch(4))
    elements = 4 * sizes.seq * 256
    assert saved.blocks["stack.blocks.1"] == pytest.approx(elements * 34, rel=0.02)
    logits = 2 * 4 * sizes.seq * sizes.vocab
    assert saved.ends == pytest.approx(4 * elements + logits, rel=0.02)
    # Narayanan et al. 2021 (2104.04473): 72·b·s·L·h²·(1 + s/(6h) + V/(12·h·L)) for forward and backward.
    formula = 72 * 4 * 128 * 3 * 256**2 * (1 + 128 / (6 * 256) + sizes.vocab / (12 * 256 * 3))
    assert 3 * saved.flops == pytest.approx(formula)


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
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install actoffload\[hf\]"):
        configuration("gpt2")
