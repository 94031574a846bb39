"""Models that the commands run or count: a user's own, the built-in GPT, and those of Transformers by configuration.

A user's own is named ``FILE.py:FUNCTION``. The function takes nothing and returns a model in training mode and a
function ``make_batch(size)`` that returns the model's arguments for so many samples, 1 or more: a tensor, a tuple of
positional or a dict of keyword arguments. What the model returns is its loss, or has it as ``loss`` (`estimate` asks
for none). Both functions are called with PyTorch's default device set to the one that is used; what they make elsewhere
is moved there. It is the meta device for ``estimate``.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..autotune.blocks import find_blocks
from ..errors import ConfigError
from ..testing.gpt import GPT, GPTConfig
from .rok_points import Case
from .saved_bytes import MIN_BYTES, SavedBytes, call, count_saved


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its batches.

    Attributes:
        model: the model.
        make_batch: the model's arguments for so many samples.
        blocks: names of the layers, which the series ``recompute`` of `rok` checkpoints one by one.
        device: where the model is.
    """

    model: nn.Module
    make_batch: Callable[[int], Any]
    blocks: tuple[str, ...]
    device: torch.device

    def batch(self, size: int) -> Any:
        """Return the model's arguments for ``size`` samples, on its device."""
        with self.device:
            made = self.make_batch(size)
        return tree_map_only(Tensor, lambda tensor: tensor.to(self.device), made)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch.

        Raises:
            ConfigError: the model returns something else.
        """
        output = call(self.model, batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            remedy = "must return its loss: a tensor of one element, or an object or dict that has it as `loss`"
            raise ConfigError("model", type(self.model).__name__, remedy)
        return loss

    def twin(self) -> Workload:
        """Return it with modules of its own, whose parameters and buffers are these."""
        shared = itertools.chain(self.model.parameters(), self.model.buffers())
        return replace(self, model=copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared}))


# -- a user's own -----------------------------------------------------------------------------------------------------


def is_own(source: str) -> bool:
    """Return whether this names a function of a user's file, rather than a preset or a configuration."""
    return ".py:" in source


def import_function(field: str, source: str) -> Callable[[], Any]:
    """Return the function that ``FILE.py:FUNCTION`` names; its file may import what lies beside it.

    Raises:
        ConfigError: there is no such file or function; names the option ``field``.
    """
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(field, source, f"there is no file {file}; give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(f"actoffload_own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for what their annotations name
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(field, source, f"{file} has no function {name!r}; give FILE.py:FUNCTION")
    found: Callable[[], Any] = function
    return found


def build_own(field: str, source: str, device: torch.device) -> Workload:
    """Return the model that a user's function makes.

    Raises:
        ConfigError: there is no such function, or it returns something else; names the option ``field``.
    """
    function = import_function(field, source)
    with device:
        made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        remedy = "the function must return a model and a function make_batch(size) that returns the model's arguments"
        raise ConfigError(field, source, remedy)
    model = made[0].to(device)
    return Workload(model=model, make_batch=made[1], blocks=tuple(find_blocks(model)), device=device)


# -- the built-in GPT, and Transformers' models -----------------------------------------------------------------------


def build_gpt(sizes: GPTConfig, *, dtype: torch.dtype, device: torch.device) -> Workload:
    """Return the built-in GPT; a sample is a sequence of ``sizes.seq`` tokens."""
    with device:
        model = GPT(sizes).to(dtype)

    def make_batch(size: int) -> tuple[Tensor, Tensor]:
        tokens = _tokens(sizes.vocab, size, sizes.seq + 1)
        return tokens[:, :-1], tokens[:, 1:]

    return Workload(model=model, make_batch=make_batch, blocks=tuple(find_blocks(model)), device=device)


def build_transformers(config: Any, *, sequence: int, dtype: torch.dtype, device: torch.device) -> Workload:
    """Return a model of Transformers in training, with its head and loss where its type has one.

    Args:
        config: its configuration.
        sequence: tokens of a sample.
        dtype: of its parameters.
        device: where it is made.
    """
    transformers = import_transformers(config.model_type)
    transformers.logging.set_verbosity_error()
    config.use_cache = False
    kinds = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
    head = next((auto for kind in kinds if type(config) in (auto := getattr(transformers, kind))._model_mapping), None)
    with device:
        model: nn.Module = (head or transformers.AutoModel).from_config(config, dtype=dtype).train()

    def make_batch(size: int) -> dict[str, Tensor]:
        tokens = _tokens(config.vocab_size, size, sequence)
        return {"input_ids": tokens} | ({"labels": tokens.clone()} if head else {})

    return Workload(model=model, make_batch=make_batch, blocks=tuple(find_blocks(model)), device=device)


def _tokens(vocab: int, size: int, sequence: int) -> Tensor:
    """Return random tokens, the same on every device; 0 may be padding."""
    return torch.randint(1, vocab, (size, sequence), device="cpu")


def import_transformers(asked_for: str) -> Any:
    """Return the package.

    Raises:
        ConfigError: it is not installed; names what was asked for.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("model", asked_for, "needs Transformers: pip install actoffload[hf]") from error
    library: Any = transformers
    return library


def read_configuration(source: str) -> Any:
    """Return the configuration in a ``config.json`` (or in a directory that has one), or a type's default one.

    Raises:
        ConfigError: it is neither, or Transformers is not installed.
    """
    auto = import_transformers(source).AutoConfig
    if Path(source).exists():
        try:
            return auto.from_pretrained(source, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError("from_model", source, f"holds no configuration of a model: {error}") from error
    try:
        return auto.for_model(source)
    except ValueError as error:
        remedy = "give FILE.py:FUNCTION, a config.json, or a model type of Transformers, such as 'llama'"
        raise ConfigError("from_model", source, remedy) from error


def configuration(model_type: str, changes: Mapping[str, Any]) -> Any:
    """Return the default configuration of a type of model with some fields changed.

    Raises:
        ConfigError: Transformers is not installed.
        ValueError: it has no such type.
    """
    return import_transformers(model_type).AutoConfig.for_model(model_type, **changes)


def count(workload: Workload, size: int, *, min_bytes: int = MIN_BYTES) -> SavedBytes:
    """Count what ``size`` samples save in a workload on the meta device; smaller tensors than ``min_bytes`` stay."""
    with unpacked_sequences():
        return count_saved(workload.model, workload.batch(size), min_bytes=min_bytes)


def unpacked_sequences() -> AbstractContextManager[Any]:
    """Return a context in which Transformers takes the sequences of meta tensors as not packed.

    It asks the positions' values, and meta tensors have none.
    """
    masks = sys.modules.get("transformers.masking_utils")
    return patch.object(masks, "find_packed_sequence_indices", return_value=None) if masks else nullcontext()


# -- the cases of `rok` -----------------------------------------------------------------------------------------------


def build(case: Case, device: torch.device | None = None) -> Workload:
    """Return the model of a case in its type; its weights by torch's seed.

    Args:
        case: what is built.
        device: where; None for PyTorch's default device.

    Raises:
        ConfigError: the model is unknown, its sizes do not fit together, or Transformers is not installed.
    """
    device = device or torch.get_default_device()
    if is_own(case.model):
        return build_own("model", case.model, device)
    if case.hidden % case.head_width:
        raise ConfigError("hidden", case.hidden, f"must be a multiple of head_width={case.head_width}")
    dtype = getattr(torch, case.dtype)
    if case.model == "gpt-small":
        sizes = GPTConfig(
            layers=case.layers, width=case.hidden, seq=case.seq, head_width=case.head_width, vocab=case.vocab
        )
        return build_gpt(sizes, dtype=dtype, device=device)
    if case.model not in TRANSFORMERS:
        raise ConfigError("model", case.model, f"choose one of 'gpt-small', {', '.join(map(repr, TRANSFORMERS))}")
    model_type, block, configure = TRANSFORMERS[case.model]
    config = configuration(model_type, configure(case))
    built = build_transformers(config, sequence=case.seq, dtype=dtype, device=device)
    # A decoder of one layer is no container of equals.
    names = (name for name, module in built.model.named_modules() if type(module).__name__ == block)
    return replace(built, blocks=tuple(names))


def _gpt(case: Case) -> dict[str, Any]:
    return {
        **{"n_embd": case.hidden, "n_layer": case.layers, "n_head": case.hidden // case.head_width},
        **{"vocab_size": case.vocab, "n_positions": case.seq, "bos_token_id": 0, "eos_token_id": 0},
        "activation_function": "gelu_pytorch_tanh",  # one kernel, as Megatron's; "gelu_new" saves five tensors more
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
        "feed_forward_proj": "gelu",  # as Megatron's
        **{"vocab_size": case.vocab, "decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0},
    }


TRANSFORMERS = {
    "gpt": ("gpt2", "GPT2Block", _gpt),
    "bert": ("bert", "BertLayer", _bert),
    "t5": ("t5", "T5Block", _t5),
}
"""The type, the class of a layer and the configuration."""
