"""Run a module twice in one process, to start only once, as ``python -m``: ``MODULE [FLAG ...] -- [FLAG ...]``.

The first run has the flags before ``--`` and ``--target none``, the second all flags and ``--target nvme``.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed

SECOND = "===== the second run"


def keep_group() -> Callable[[], None]:
    """Keep the process group for the second run, because ranks that initialize it again over one store may hang."""
    distributed: Any = torch.distributed
    make, end = distributed.init_process_group, distributed.destroy_process_group

    def init(*args: Any, **options: Any) -> None:
        if not distributed.is_initialized():
            make(*args, **options)

    distributed.init_process_group, distributed.destroy_process_group = init, lambda *_: None
    return end  # type: ignore[no-any-return]


def main() -> None:
    end = keep_group()
    name, *flags = sys.argv[1:]
    both, more = flags[: flags.index("--")], flags[flags.index("--") + 1 :]
    sys.argv = [name, *both, "--target", "none"]
    runpy.run_module(name, run_name="__main__")
    for stream in (sys.stdout, sys.stderr) if os.environ.get("RANK", "0") == "0" else ():  # it prints the losses
        print(SECOND, file=stream, flush=True)
    sys.argv = [name, *both, "--target", "nvme", *more]
    runpy.run_module(name, run_name="__main__")
    if torch.distributed.is_initialized():
        end()


if __name__ == "__main__":
    main()
