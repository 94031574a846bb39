"""Models with random weights for ``actoffload rok``: GPT, BERT and T5 from Transformers, and the built-in GPT.

``transformers`` is imported here alone (``pip install actoffload[hf]``); ``gpt-small`` does without it.
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
    makers: dict[str, Callable[[Case], Workload]] = {"gpt-small": _gpt_small, "gpt": _gpt, "bert": _bert, "t5": _t5}
    if case.model not in makers:
        raise ConfigError("model", case.model, f"choose one of {', '.join(map(repr, makers))}")
    if case.hidden % case.head_width:
        raise ConfigError("hidden", case.hidden, f"must be a multiple of head_width={case.head_width}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case.dtype))
    try:
        return makers[case.model](case)
    finally:
        torch.set_default_dtype(before)


def _gpt_small(case: Case) -> Workload:
    config = GPTConfig(
        layers=case.layers, width=case.hidden, seq=case.seq, head_width=case.head_width, vocab=case.vocab
    )
    blocks = _names("stack.blocks", case.layers)
    return Workload(GPT(config), lambda model, tokens: model(tokens[:, :-1], tokens[:, 1:]), blocks)


def _transformers(case: Case) -> Any:
    try:
        import transformers
    except ImportError as error:
        remedy = "needs Transformers: pip install actoffload[hf]; or take the built-in gpt-small"
        raise ConfigError("model", case.model, remedy) from error
    library: Any = transformers
    library.logging.set_verbosity_error()
    return library


def _gpt(case: Case) -> Workload:
    hf = _transformers(case)
    config = hf.GPT2Config(
        vocab_size=case.vocab,
        n_positions=case.seq,
        n_embd=case.hidden,
        n_layer=case.layers,
        n_head=case.hidden // case.head_width,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
        use_cache=False,
    )
    model = hf.GPT2LMHeadModel(config).train()
    return Workload(model, _own_loss, _names("transformer.h", case.layers))


def _bert(case: Case) -> Workload:
    hf = _transformers(case)
    config = hf.BertConfig(
        vocab_size=case.vocab,
        max_position_embeddings=case.seq,
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // case.head_width,
        intermediate_size=4 * case.hidden,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    )
    model = hf.BertForMaskedLM(config).train()
    return Workload(model, _own_loss, _names("bert.encoder.layer", case.layers))


def _t5(case: Case) -> Workload:
    """Put half of the layers (rounded down) in the decoder, as in SSDTrain's runs."""
    hf = _transformers(case)
    decoder = max(1, case.layers // 2)
    encoder = max(1, case.layers - decoder)
    config = hf.T5Config(
        vocab_size=case.vocab,
        d_model=case.hidden,
        d_kv=case.head_width,
        d_ff=4 * case.hidden,
        num_layers=encoder,
        num_decoder_layers=decoder,
        num_heads=case.hidden // case.head_width,
        **dict.fromkeys(("decoder_start_token_id", "pad_token_id"), 0),
        dropout_rate=0.0,
        use_cache=False,
    )
    model = hf.T5ForConditionalGeneration(config).train()
    return Workload(model, _own_loss, _names("encoder.block", encoder) + _names("decoder.block", decoder))


def _own_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss that a model of Transformers computes itself; the tokens are input and labels."""
    value: Tensor = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:].contiguous()).loss
    return value


def _names(container: str, count: int) -> tuple[str, ...]:
    return tuple(f"{container}.{number}" for number in range(count))
