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
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors as errors
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .api import *  # noqa: F403
    from .api import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """Import the library, and torch with it, when its first name is used: a command's help needs neither.

        Its rooms (``actoffload.planning``) are attributes from then on, too.
        """
        if not name.startswith("__") or name == "__all__":
            api = import_module(".api", __name__)  # `from . import api` would ask this function for it
            if name in ("__all__", *getattr(api, "__all__", ())):  # half imported, it has no list yet
                globals()[name] = getattr(api, name)
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})


logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet, unless the program adds a handler
