r"""torchtitan: one more activation-checkpointing config to choose on its command line.

    python -m actoffload.integrations.torchtitan --module llama3 --config llama3_8b --training.disable_cuda_graphs \
        activation-checkpoint:actoffload --activation-checkpoint.target nvme  # needs a GPU

This module replaces ``torchtitan.train``: with torchtitan's script, ``TRAIN_FILE=actoffload.integrations.torchtitan``
is the only change before the flags. `register` does the same for a program that starts a trainer itself.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, fields, make_dataclass
from typing import Annotated, Any, Literal

from torch import nn

from actoffload import OffloadConfig, Offloader, attach
from actoffload.errors import ConfigError

try:
    import tyro
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC
    from torchtitan.tools.logging import logger
    from torchtitan.trainer import Trainer
except ImportError as error:
    # torchtitan imports Triton without requiring it, and PyTorch for the CPU does not bring it.
    package = "triton" if error.name == "triton" else "actoffload[torchtitan]"
    raise ImportError(f"needs torchtitan, tested with 0.3.0 (pip install {package}): {error}") from error

_CHECKPOINTINGS: dict[str, type[ActivationCheckpointing]] = {"full": FullAC, "selective": SelectiveAC}
_ONE_GRAPH = "graph_trainer traces forward, loss and backward as one graph, which saves nothing that could be moved"
_SAME_TENSORS = "torchtitan would move the same activations: switch one of the two off"


_THEIRS = {field.name for field in fields(ActivationCheckpointing.Config)}
"""Fields of every config of torchtitan's: it has a "debug" too, so that ours is a variable alone."""
_FLAGS = {name: kind for name, kind in OffloadConfig.flags().items() if name not in _THEIRS}
_Flags: Any = make_dataclass(
    "_Flags",
    [(name, Annotated[kind.flag | None, tyro.conf.arg(help=kind.help)], None) for name, kind in _FLAGS.items()],
    bases=(ActivationCheckpointing.Config,),
    kw_only=True,
    slots=True,
)


class OffloadAC(ActivationCheckpointing):
    """Moves the tensors that the model saves for backward, after any checkpointing of its transformer blocks."""

    @dataclass(kw_only=True, slots=True)
    class Config(_Flags):
        """A flag for each option; variables ``ACTOFFLOAD_<OPTION>`` set these by default."""

        checkpointing: Literal["none", "selective", "full"] = "none"
        """Which blocks run again in backward: none, or as with torchtitan's own config of this name."""

    config: Config

    def apply(self, model: nn.Module) -> None:
        """Checkpoint the blocks where the config says so. The trainer attaches the model once it has built it."""
        kind = _CHECKPOINTINGS.get(self.config.checkpointing)
        if kind is not None:
            kind(kind.Config(**{name: getattr(self.config, name) for name in _THEIRS})).apply(model)


@functools.cache
def register() -> None:
    """Add ``activation-checkpoint:actoffload`` to the command line, and let ``ACTOFFLOAD`` attach trainers' models.

    A trainer raises a `ConfigError` when it is built if an option cannot work, with CUDA graphs, and with torchtitan's
    own offloading. It logs the report when it is closed.
    """
    # tyro reads the annotation when it parses the command line, so the new choice must be there before that.
    annotations = Trainer.Config.__annotations__
    chosen = Annotated[OffloadAC.Config, tyro.conf.subcommand("actoffload")]
    annotations["activation_checkpoint"] = annotations["activation_checkpoint"] | chosen
    build, close = Trainer.__init__, Trainer.close

    @functools.wraps(build)
    def build_and_attach(self: Any, config: Any) -> None:
        options = _options(config.activation_checkpoint)
        if options is not None:
            _refuse_conflicts(config)  # before the trainer spends minutes on building the model
        build(self, config)
        self.actoffload = []
        # After `build`: it shards, compiles and checkpoints the model, and the attachment must be around all of that.
        # All stages of a pipeline share one offloader, because their order is planned together.
        if options is not None:
            offloader = Offloader(OffloadConfig(**options))
            self.actoffload = [attach(part, offloader=offloader) for part in self.model_parts]

    @functools.wraps(close)
    def report_and_close(self: Any) -> None:
        for offloader in {attachment.offloader for attachment in self.actoffload}:
            logger.info(offloader.report())
        close(self)

    Trainer.__init__, Trainer.close = build_and_attach, report_and_close


def _options(chosen: object) -> dict[str, Any] | None:
    """The options of `attach` from the flags, then from the environment; None if neither switches offloading on."""
    environment = dict(os.environ)
    if environment.get("ACTOFFLOAD", "0") in {"", "0", "off"}:
        environment.pop("ACTOFFLOAD", None)
    if not isinstance(chosen, OffloadAC.Config):
        return OffloadConfig.options_from_environment(environment) if "ACTOFFLOAD" in environment else None
    given = {name: getattr(chosen, name) for name in _FLAGS}
    flags = OffloadConfig.options_from_flags(given, "activation_checkpoint.{}".format)
    return {**OffloadConfig.options_from_environment(environment), **flags}


def _refuse_conflicts(config: Any) -> None:
    if getattr(config.compile, "memory_policy", None) == "sac_and_offload":
        raise ConfigError("compile.memory_policy", "sac_and_offload", _SAME_TENSORS)
    if getattr(config.compile, "mode", None) is not None:
        raise ConfigError("compile.mode", config.compile.mode, _ONE_GRAPH)
    if not config.training.disable_cuda_graphs:
        remedy = "a captured step moves nothing: set --training.disable_cuda_graphs"
        raise ConfigError("training.disable_cuda_graphs", False, remedy)


def main() -> None:
    """Run ``torchtitan.train`` with the additional config."""
    from torchtitan import train

    register()
    train.main()


if __name__ == "__main__":
    # Run the imported module, not `__main__`: `switch` may have imported it, and two modules would have two configs.
    from actoffload.integrations import torchtitan as this

    this.main()
