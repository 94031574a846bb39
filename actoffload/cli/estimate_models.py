"""Models for ``actoffload estimate`` on meta tensors: a user's own, or one of Transformers by its configuration."""

from __future__ import annotations

import importlib.util
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ..analysis.estimate import Activations
from ..analysis.megatron import Parallelism
from ..analysis.saved_bytes import MIN_BYTES, SavedBytes, count_saved
from ..errors import ConfigError
from ..sizes import format_size
from .transformers_models import build_transformers, configuration, import_transformers

FIELD = "from_model"


def count_own(source: str, min_bytes: int = MIN_BYTES) -> SavedBytes:
    """Count the model and inputs that ``FILE.py:FUNCTION`` returns, called with ``torch.device("meta")``.

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    file, _, name = source.rpartition(":")
    if not Path(file).is_file():
        raise ConfigError(FIELD, source, f"there is no file {file}; give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location("actoffload_estimated_model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build = getattr(module, name, None)
    if not callable(build):
        raise ConfigError(FIELD, source, f"{file} has no function {name!r}")
    with torch.device("meta"):
        found = build()
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)):
        raise ConfigError(FIELD, source, f"{name}() must return a model and its inputs (a tensor, a tuple or a dict)")
    return count_saved(*found, min_bytes=min_bytes)


def read_configuration(source: str) -> Any:
    """Return the configuration in a ``config.json`` (or in a directory that has one), or a type's default one.

    Raises:
        ConfigError: it is neither, or Transformers is not installed.
    """
    transformers = import_transformers(source)
    if Path(source).exists():
        try:
            return transformers.AutoConfig.from_pretrained(source, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(FIELD, source, f"holds no configuration of a model: {error}") from error
    try:
        return configuration(source, {})
    except ValueError as error:
        remedy = "give FILE.py:FUNCTION, a config.json, or a model type of Transformers, such as 'llama'"
        raise ConfigError(FIELD, source, remedy) from error


def count_transformers(
    config: Any, *, sequence: int, micro_batch: int, min_bytes: int = MIN_BYTES, dtype: torch.dtype = torch.bfloat16
) -> SavedBytes:
    """Count a model of Transformers in training, with its head and loss where its type has one.

    Args:
        config: its configuration.
        sequence: tokens of a sequence.
        micro_batch: sequences.
        min_bytes: smaller tensors stay.
        dtype: what it computes in.
    """
    with torch.device("meta"):
        model, inputs = build_transformers(config, sequence=sequence, micro_batch=micro_batch, dtype=dtype)
    # It asks the positions' values whether sequences are packed, and meta tensors have none: they are not packed.
    with patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None):
        return count_saved(model, inputs, min_bytes=min_bytes)


def activations(saved: SavedBytes, label: str, split: Parallelism, *, recompute: bool) -> Activations:
    """Return what was counted as `estimate` takes it, on one tensor- and context-parallel rank.

    Raises:
        ConfigError: it cannot be split so, or nothing was found that repeats.
    """
    if not saved.blocks:
        raise ConfigError(FIELD, label, "no blocks found: an estimate is of layers in a ModuleList or Sequential")
    if split.tensor > 1 and not split.sequence_parallel:
        remedy = "a counted model needs --sequence-parallel, under which every tensor is split"
        raise ConfigError("tensor", split.tensor, remedy)
    ranks = split.tensor * split.context
    blocks = saved.inputs if recompute else saved.blocks
    attention = "flash attention" if saved.fused_attention else "the model's own attention, whose matrices are kept"
    return Activations(
        label=f"{label}: {kinds_of(saved)}",
        blocks=tuple(nbytes / ranks for nbytes in blocks.values()),
        small_bytes=0 if recompute else saved.small / ranks,
        ends_bytes=saved.ends / ranks,
        flops=(4 if recompute else 3) * saved.flops,
        source=f"counting on meta tensors, with {attention}",
    )


def kinds_of(saved: SavedBytes) -> str:
    """Return the layers in runs of equal size, such as ``"3 × 464.0 MiB, 58 × 725.2 MiB"``."""
    runs = [(len(list(run)), size) for size, run in groupby(map(format_size, saved.blocks.values()))]
    return ", ".join(f"{count} × {size}" for count, size in runs[:4]) + (", …" if len(runs) > 4 else "")
