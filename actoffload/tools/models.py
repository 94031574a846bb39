"""Models that the commands run or count: a user's own, the built-in GPT, and Transformers' models by configuration.

A user's own is named ``FILE.py:FUNCTION``; the page of the commands says what the function returns.
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
from torch.utils._pytree import tree_leaves, tree_map_only

from ..autograd.packing import DEVICE_MIN_BYTES
from ..autotune.blocks import find_blocks
from ..errors import ConfigError
from ..planning.profile import Link, Profile, Region, Storage
from ..planning.regions import choosable, run_again, with_regions
from ..policy import KeepReason
from ..testing.gpt import GPT, GPTConfig
from .on_paper import TABLES, Case, Hardware, is_own
from .saved_bytes import WatchedStep, call


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model, the function that makes a batch of a number of samples, and the names of the model's layers."""

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
        """Return the loss of a batch; on the meta device, where nothing is trained, any output will do."""
        output = call(self.model, batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if self.device.type == "meta" and not (isinstance(loss, Tensor) and loss.numel() == 1):
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
            loss = sum(tensor.sum() for tensor in tensors)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            remedy = "must return its loss: a tensor of one element, or an object or dict that has it as `loss`"
            raise ConfigError("model", type(self.model).__name__, remedy)
        if torch.is_grad_enabled() and not loss.requires_grad:
            remedy = "its loss has no gradient: train some of its parameters, and run its forward with gradients"
            raise ConfigError("model", type(self.model).__name__, remedy)
        return loss

    def twin(self) -> Trainee:
        """Return a copy with modules of its own, which share the parameters and buffers."""
        # `deepcopy` takes a tensor that its memo has for copied, so these stay the same objects.
        shared = itertools.chain(self.model.parameters(), self.model.buffers())
        return replace(self, model=copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared}))


def import_function(field: str, source: str) -> Callable[[], Any]:
    """Return the function that ``FILE.py:FUNCTION`` names; its file may import files beside it."""
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(field, source, f"there is no file {file}; give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(f"actoffload_own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the names in their annotations there
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(field, source, f"{file} has no function {name!r}; give FILE.py:FUNCTION")
    found: Callable[[], Any] = function
    return found


def build_own(field: str, source: str, device: torch.device) -> Trainee:
    """Return the model that a user's function makes."""
    function = import_function(field, source)
    with device:
        made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        remedy = "the function must return a model and a function make_batch(size) that returns the model's arguments"
        raise ConfigError(field, source, remedy)
    return _workload(made[0].to(device), made[1], device)


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it (LoRA, arXiv 2106.09685), in float32 as PEFT makes it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        like: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": torch.float32}
        self.base, self.down = base, nn.Linear(base.in_features, rank, **like)
        self.up = nn.Linear(rank, base.out_features, **like)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the sum of both."""
        frozen = self.base(hidden)
        adapted: Tensor = frozen + self.up(self.down(hidden.to(self.down.weight.dtype)))
        return adapted.to(frozen.dtype)


def adapt(workload: Trainee, rank: int) -> None:
    """Freeze a model, and put an adapter beside each linear layer of its blocks."""
    workload.model.requires_grad_(False)
    for block in map(workload.model.get_submodule, workload.blocks):
        for name, linear in [each for each in block.named_modules() if isinstance(each[1], nn.Linear)]:
            parent, _, attribute = name.rpartition(".")
            setattr(block.get_submodule(parent), attribute, _Adapted(linear, rank))


def build_gpt(sizes: GPTConfig, *, dtype: torch.dtype, device: torch.device) -> Trainee:
    """Return the built-in GPT; a sample is a sequence of ``sizes.seq`` tokens."""
    with device:
        model = GPT(sizes).to(dtype)

    def make_batch(size: int) -> tuple[Tensor, Tensor]:
        tokens = _tokens(sizes.vocab, size, sizes.seq + 1)
        return tokens[:, :-1], tokens[:, 1:]

    return _workload(model, make_batch, device)


def build_transformers(config: Any, *, sequence: int, dtype: torch.dtype, device: torch.device) -> Trainee:
    """Return a model of Transformers in training, with its head and loss if its type has one."""
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

    return _workload(model, make_batch, device)


def _workload(model: nn.Module, make_batch: Callable[[int], Any], device: torch.device) -> Trainee:
    return Trainee(model=model, make_batch=make_batch, blocks=tuple(find_blocks(model)), device=device)


def _tokens(vocab: int, size: int, sequence: int) -> Tensor:
    """Return random tokens, the same on every device; 0 may be padding."""
    return torch.randint(1, vocab, (size, sequence), device="cpu")


def import_transformers(model: str) -> Any:
    """Return the package."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("model", model, "needs Transformers: pip install actoffload[hf]") from error
    library: Any = transformers
    return library


def configuration(source: str, **changes: Any) -> Any:
    """Return the configuration in a ``config.json`` (or in a directory that has one), or a type's with some changes."""
    auto = import_transformers(source).AutoConfig
    try:
        if not changes and Path(source).exists():
            return auto.from_pretrained(source, local_files_only=True)
        return auto.for_model(source, **changes)
    except (OSError, ValueError) as error:
        remedy = "give FILE.py:FUNCTION, a config.json, or a model type of Transformers, such as 'llama'"
        raise ConfigError("from_model", source, f"{remedy} ({error})" if Path(source).exists() else remedy) from error


def unpacked_sequences() -> AbstractContextManager[Any]:
    """Return a context in which Transformers takes the sequences of meta tensors as not packed.

    Transformers reads the values of the positions, and meta tensors have none.
    """
    masks = sys.modules.get("transformers.masking_utils")
    return patch.object(masks, "find_packed_sequence_indices", return_value=None) if masks else nullcontext()


def build(case: Case, device: torch.device | None = None) -> Trainee:
    """Return the model of a case in its type, with weights by torch's seed; on PyTorch's default device by default."""
    workload = _build(case, device or torch.get_default_device())
    if case.adapters:
        adapt(workload, case.adapters)
    return workload


def _build(case: Case, device: torch.device) -> Trainee:
    if is_own(case.model):
        return build_own("model", case.model, device)
    if case.hidden % case.head_width:
        raise ConfigError("hidden", case.hidden, f"must be a multiple of head_width={case.head_width}")
    dtype = getattr(torch, case.dtype)
    if case.model == "gpt-small":
        sizes = {"layers": case.layers, "width": case.hidden, "seq": case.seq, "head_width": case.head_width}
        return build_gpt(GPTConfig(**sizes, vocab=case.vocab), dtype=dtype, device=device)  # type: ignore[arg-type]
    known = TABLES["transformers"].get(case.model, {"type": case.model, "config": {}})
    config = configuration(known["type"], **_sizes(case, configuration(known["type"])), **known["config"])
    built = build_transformers(config, sequence=case.seq, dtype=dtype, device=device)
    if "block" not in known:
        return built
    # `find_blocks` does not see a decoder of one layer: it is no container of equals.
    names = (name for name, module in built.model.named_modules() if type(module).__name__ == known["block"])
    return replace(built, blocks=tuple(names))


def _sizes(case: Case, default: Any) -> dict[str, Any]:
    """Return a case's sizes, few heads and few experts, under the names that a type's configuration has."""
    layers, inner, heads = case.layers, 4 * case.hidden, case.hidden // case.head_width
    sizes = {"hidden_size": case.hidden, "vocab_size": case.vocab, "max_position_embeddings": case.seq}
    sizes |= {"intermediate_size": inner, "d_ff": inner, "head_dim": case.head_width, "d_kv": case.head_width}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": layers}
    if hasattr(default, "num_decoder_layers"):  # half of the layers, rounded down, as in SSDTrain's runs
        decoder = max(1, layers // 2)
        sizes |= {"num_hidden_layers": max(1, layers - decoder), "num_decoder_layers": decoder}
    sizes |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": case.hidden}
    sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    return {name: size for name, size in sizes.items() if getattr(default, name, None) is not None}


# -- a step, predicted ------------------------------------------------------------------------------------------------


def profiles_of(
    workload: Trainee, batch: int, hardware: Hardware, ranks: int = 1
) -> tuple[Profile, Profile, WatchedStep]:
    """Predict a step in which every block is checkpointed and runs again, and one without checkpoints.

    Return both, and how the step was watched: forward and backward of ``batch`` samples run on meta tensors, on a clock
    that goes by FLOPs. Bytes go between the GPU and its SSDs directly, as in SSDTrain. Each of ``ranks`` GPUs has an
    equal part of all tensors and FLOPs.
    """
    model, inputs = workload.model, workload.batch(batch)
    step = WatchedStep(model, {name: model.get_submodule(name) for name in workload.blocks}, inputs)
    with unpacked_sequences(), step.flops:
        with step.forward():
            loss = workload.loss(inputs)
        torch.autograd.backward(loss)
    end, rate = step.now(), hardware.flops_per_s * ranks
    saved, sources = list(step.saved.values()), _sources(step)

    def size(nbytes: int) -> dict[str, Any]:
        return {"nbytes": nbytes // ranks, "kept": "" if nbytes >= DEVICE_MIN_BYTES else KeepReason.SMALL.value}

    # A shared storage, or a checkpoint's input, lives on when its block runs again, so it belongs to no region.
    storages = [
        Storage(
            index=number,
            **size(one.nbytes),
            birth_s=one.birth / rate,
            need_s=None if one.need is None else one.need / rate,
            last_need_s=(end if one.last_need is None else one.last_need) / rate,
            module=None if one.block is None else step.blocks[one.block].name,
            region=None if one.shared or number in sources.values() else one.block,
        )
        for number, one in enumerate(saved)
    ]
    for place, block in enumerate(step.blocks):
        if place in sources:
            continue
        # A checkpoint saves its input even if a plain run of the block does not.
        sources[place] = index = len(storages)
        last_s = max((s.last_need_s for s in storages if s.region == place), default=block.end / rate)
        common: dict[str, Any] = {**size(block.input_bytes), "module": block.name, "input_of": place}
        storages.append(Storage(index=index, birth_s=block.begin / rate, need_s=None, last_need_s=last_s, **common))
    plain = Profile(
        storages=tuple(storages),
        regions=tuple(
            Region(place=place, name=block.name, begin_s=block.begin / rate, end_s=block.end / rate)
            for place, block in enumerate(step.blocks)
        ),
        disk=Link(write_bytes_per_s=hardware.write_bytes_per_s, read_bytes_per_s=hardware.read_bytes_per_s),
        forward_s=step.forward_flops / rate,
        backward_s=(end - step.forward_flops) / rate,
        device=hardware.name,
    )
    codes = {
        n: one.once_bytes // ranks for n, one in enumerate(saved) if one.once_bytes < one.nbytes >= DEVICE_MIN_BYTES
    }
    again = run_again(plain, sources, {})
    return run_again(plain, sources, codes), with_regions(again, choosable(again)), step


def _sources(step: WatchedStep) -> dict[int, int]:
    """Return, by block, the storage that a checkpoint of it saves as its input, if a plain run saves that, too."""
    numbers: dict[int | None, int] = {key: number for number, key in enumerate(step.saved)}
    saved = list(step.saved.values())
    found: dict[int, int] = {}
    for place, block in enumerate(step.blocks):
        source = numbers.get(block.source)
        if source is not None and (saved[source].shared or saved[source].block in (None, place)):
            found[place] = source
    return found
