"""Models with random weights for ``actoffload rok``: GPT, BERT and T5 from Transformers, and the built-in GPT.

``gpt-small`` does without Transformers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..analysis.rok import Case
from ..errors import ConfigError
from ..testing.gpt import GPT, GPTConfig
from .transformers_models import build_transformers, configuration


@dataclass(frozen=True)
class Workload:
    """A model and what is asked of it.

    Attributes:
        model: the model.
        forward: the loss of a model of this kind: mean cross-entropy in nats of a batch of tokens.
        blocks: names of the layers, which the series ``recompute`` checkpoints one by one.
    """

    model: nn.Module
    forward: Callable[[Any, Tensor], Tensor]
    blocks: tuple[str, ...]

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the loss of a batch of tokens, (batch, seq + 1) int64."""
        return self.forward(self.model, tokens)

    def twin(self) -> Workload:
        """Return it with modules of its own, whose parameters and buffers are these."""
        shared = itertools.chain(self.model.parameters(), self.model.buffers())
        return replace(self, model=copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared}))


def build(case: Case) -> Workload:
    """Return the model of a case, on torch's default device and in its type; its weights by torch's seed.

    Raises:
        ConfigError: the model is unknown, its sizes do not fit together, or Transformers is not installed.
    """
    if case.hidden % case.head_width:
        raise ConfigError("hidden", case.hidden, f"must be a multiple of head_width={case.head_width}")
    dtype = getattr(torch, case.dtype)
    if case.model == "gpt-small":
        sizes = GPTConfig(
            layers=case.layers, width=case.hidden, seq=case.seq, head_width=case.head_width, vocab=case.vocab
        )
        model: nn.Module = GPT(sizes).to(dtype)
        return Workload(model, lambda gpt, tokens: gpt(tokens[:, :-1], tokens[:, 1:]), _named(model, "Block"))
    if case.model not in TRANSFORMERS:
        raise ConfigError("model", case.model, f"choose one of 'gpt-small', {', '.join(map(repr, TRANSFORMERS))}")
    model_type, block, configure = TRANSFORMERS[case.model]
    config = configuration(model_type, configure(case))
    model, _ = build_transformers(config, sequence=1, micro_batch=1, dtype=dtype)
    return Workload(model, _own_loss, _named(model, block))


def _own_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss that a model of Transformers computes itself; the tokens are input and labels."""
    value: Tensor = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:].contiguous()).loss
    return value


def _named(model: nn.Module, block: str) -> tuple[str, ...]:
    return tuple(name for name, module in model.named_modules() if type(module).__name__ == block)


def _gpt(case: Case) -> dict[str, Any]:
    return {
        **{"n_embd": case.hidden, "n_layer": case.layers, "n_head": case.hidden // case.head_width},
        **{"vocab_size": case.vocab, "n_positions": case.seq, "bos_token_id": 0, "eos_token_id": 0},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _bert(case: Case) -> dict[str, Any]:
    return {
        **{"hidden_size": case.hidden, "num_hidden_layers": case.layers, "intermediate_size": 4 * case.hidden},
        "num_attention_heads": case.hidden // case.head_width,
        **{"vocab_size": case.vocab, "max_position_embeddings": case.seq},
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    }


def _t5(case: Case) -> dict[str, Any]:
    """Put half of the layers (rounded down) in the decoder, as in SSDTrain's runs."""
    decoder = max(1, case.layers // 2)
    return {
        **{"d_model": case.hidden, "d_kv": case.head_width, "num_heads": case.hidden // case.head_width},
        **{"d_ff": 4 * case.hidden, "num_layers": max(1, case.layers - decoder), "num_decoder_layers": decoder},
        **{"vocab_size": case.vocab, "decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0},
    }


TRANSFORMERS = {
    "gpt": ("gpt2", "GPT2Block", _gpt),
    "bert": ("bert", "BertLayer", _bert),
    "t5": ("t5", "T5Block", _t5),
}
"""The type, the class of a layer and the configuration."""
