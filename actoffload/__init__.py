"""actoffload moves saved activations from the accelerator to host memory or NVMe, and back before backward needs them.

    import actoffload

    with actoffload.offload_activations(target="nvme", path="/mnt/nvme0", model=model) as offloader:
        loss = model(batch).loss
    loss.backward()
    print(offloader.report())

`offload_activations` and `attach` are the entry points. `OffloadConfig` has the options.
"""

from __future__ import annotations

import logging

from . import errors
from .api import Attachment, attach, offload_activations
from .autograd.checkpoints import checkpoint
from .autograd.exclusions import keep, no_offload
from .autograd.offloader import Offloader
from .autograd.selective import create_selective_checkpoint_contexts
from .autograd.tensor_names import name
from .config import OffloadConfig
from .planning.plan import Plan
from .planning.profile import Profile
from .policy import Decision, Policy, TensorFacts
from .statistics import Statistics
from .storage.engines.base import StorageEngine
from .version import __version__

logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet, unless the program adds a handler

__all__ = [
    "Attachment",
    "Decision",
    "OffloadConfig",
    "Offloader",
    "Plan",
    "Policy",
    "Profile",
    "Statistics",
    "StorageEngine",
    "TensorFacts",
    "__version__",
    "attach",
    "checkpoint",
    "create_selective_checkpoint_contexts",
    "errors",
    "keep",
    "name",
    "no_offload",
    "offload_activations",
]
