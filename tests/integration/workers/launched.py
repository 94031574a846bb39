"""Programs that ``accelerate launch`` starts: a Trainer and a loop of Accelerate's, on FSDP2 and on ZeRO 1 to 3.

This process imports the frameworks once. For each rank that the launcher starts, it forks a child with the
launcher's environment. The child runs all programs for the configuration file of that launch.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener
from typing import Any
from unittest.mock import patch

import accelerate
import deepspeed
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from actoffload.integrations.hf import attach
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from tests.integration.evidence import Run, counting_owners, noting_offloaders, unpatched
from tests.integration.hf_models import QUIET, llama, spool, texts
from tests.integration.processes import prepare_to_fork, scratch

SETUPS = ("FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")
RUNS = ((False, "none"), (False, "env"), (True, "env"))
"""(with the framework's checkpoints, way to offload); all have the bits of the first."""


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    """The state of a fresh process: no state of a program that ran before, and gloo on the CPU."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()

    def backend(*ignored: object) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    # Without an accelerator, Accelerate joins no group for FSDP or DeepSpeed.
    device = patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": "cpu"})
    with device, patch.object(PartialState, "_prepare_backend", backend):
        yield


class Program:
    """A user's program: the run that it records, and the models that it trains."""

    def __init__(self, setup: str, checkpointed: bool, way: str) -> None:
        self.folder = scratch() / "-".join((type(self).__name__, setup, str(checkpointed), way))
        self.by_hand = checkpointed and setup != "FSDP2"  # for FSDP2 the configuration file switches checkpoints on
        self.way, self.found, self.models = way, Run(), list[nn.Module]()

    def finish(self) -> None:
        """Record this rank's part of the weights, and the saved weights."""
        dist.barrier()
        for name, parameter in self.models[-1].named_parameters():
            part: Any = getattr(parameter, "ds_tensor", parameter.detach())
            part = part.to_local() if isinstance(part, DTensor) else part
            self.found.tensors[name.replace("_checkpoint_wrapped_module.", "")] = part.clone()
        for file in (self.folder / "final").glob("*.safetensors"):
            self.found.tensors |= {f"saved {name}": tensor for name, tensor in load_file(file).items()}

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of all models: this rank's part, or the whole if it is gathered at this moment."""
        for parameter in (each for model in self.models for each in model.parameters()):
            yield parameter._local_tensor if isinstance(parameter, DTensor) else parameter


class Trained(Program):
    """A Trainer that saves a checkpoint, another that resumes from it, and ``save_model``."""

    def run(self) -> None:
        usual = {**QUIET, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "use_cpu": False}
        usual |= {"gradient_checkpointing": self.by_hand}
        data: Any = texts(16)
        for steps, save, resume in ((1, "steps", None), (2, "no", str(self.folder / "checkpoint-1"))):
            chosen = {**usual, "max_steps": steps, "save_strategy": save}
            arguments = transformers.TrainingArguments(str(self.folder), **chosen)
            trainer: Any = transformers.Trainer(llama(), arguments, train_dataset=data, eval_dataset=data[:4])
            self.models.append(trainer.model)
            if self.way == "code":
                attach(trainer, **spool(scratch(), device_budget="48KiB"))
            trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(self.folder / "final"))
        logged = [log[name] for log in trainer.state.log_history for name in ("loss", "eval_loss") if name in log]
        self.found.losses = [torch.tensor(value) for value in logged]
        self.finish()


class Looped(Program):
    """A loop as Accelerate's guide writes it. It saves its state after one step, and loads it again after two."""

    def run(self) -> None:
        accelerator = accelerate.Accelerator()
        model: Any = llama()
        if self.by_hand:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loader: Any = torch.utils.data.DataLoader(texts(16), batch_size=4)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
        self.models.append(model)
        first, second = loader
        for number, batch in enumerate((first, second, second)):
            if number == 2:
                accelerator.load_state(str(self.folder / "state"))
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.found.losses.append(loss.detach().clone())
            if number == 0:
                accelerator.save_state(str(self.folder / "state"))
        del loss
        accelerator.save_model(model, str(self.folder / "final"))
        self.finish()


def run(kind: Callable[..., Any], setup: str, checkpointed: bool, way: str) -> Run:
    program = kind(setup, checkpointed, way)
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_launched())
        made = stack.enter_context(noting_offloaders())
        meter = stack.enter_context(counting_owners(program.parameters))
        if way != "env":
            stack.enter_context(unpatched())
        program.run()
    found: Run = program.found
    found.moved_parameter_bytes = meter.parameter_bytes
    if made:
        assert all(offloader.statistics().moved_bytes > 0 for offloader in made)
        made[-1].synchronize()
        found.statistics = made[-1].statistics()
    for offloader in made:
        offloader.close()
    return found


ROWS: list[tuple[type[Program], str, bool, str]] = [
    *((kind, setup, *each) for setup in SETUPS for kind in (Trained, Looped) for each in RUNS),
    (Trained, "ZeRO-3", True, "code"),
]


def serve(variables: dict[str, str], file: str) -> None:
    """Run each row of one configuration file in one rank."""
    os.environ.clear()
    os.environ.update(variables)
    rows = [row for row in ROWS if file == (f"{row[1]}-{row[2]}" if row[1] == "FSDP2" else row[1])]
    found = {(row[0].__name__, *row[1:]): run(*row) for row in rows}
    torch.save(found, scratch() / f"{file}-rank{os.environ['RANK']}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Serve each rank in a child, until the test ends this process."""
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo suffices; this op takes a minute to compile
    transformers.conversion_mapping.get_checkpoint_conversion_mapping("llama")  # every save asks for this table
    prepare_to_fork()
    with Listener(str(scratch() / "socket")) as ranks:
        while True:
            with ranks.accept() as rank:
                if os.fork():
                    continue
                status = 1
                try:
                    serve(*rank.recv())
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    rank.send(status)
                    os._exit(status)


if __name__ == "__main__":
    main()
