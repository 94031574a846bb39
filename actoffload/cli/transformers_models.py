"""Models of Transformers by their type and configuration; ``transformers`` is imported where one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError


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


def configuration(model_type: str, changes: Mapping[str, Any]) -> Any:
    """Return the default configuration of a type of model with some fields changed.

    Raises:
        ConfigError: Transformers is not installed.
        ValueError: it has no such type.
    """
    return import_transformers(model_type).AutoConfig.for_model(model_type, **changes)


def build_transformers(
    config: Any, *, sequence: int, micro_batch: int, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model in training, with its head and loss where its type has one, and inputs.

    Args:
        config: its configuration.
        sequence: tokens of a sequence of the inputs.
        micro_batch: sequences of the inputs.
        dtype: of its parameters. The device is PyTorch's default.
    """
    transformers = import_transformers(config.model_type)
    transformers.logging.set_verbosity_error()
    config.use_cache = False
    kinds = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
    head = next((auto for kind in kinds if type(config) in (auto := getattr(transformers, kind))._model_mapping), None)
    model = (head or transformers.AutoModel).from_config(config, dtype=dtype).train()
    tokens = torch.ones(micro_batch, sequence, dtype=torch.long)
    return model, {"input_ids": tokens} | ({"labels": tokens.clone()} if head else {})
