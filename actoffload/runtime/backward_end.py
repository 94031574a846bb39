"""A callback of autograd's engine at the end of a run of backward, once for each run."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable


class BackwardEnd:
    """Has a method called at the end of the run of backward in which `expect` was called.

    The engine calls it on the thread that called backward, once every gradient is there. A run that raises ends without
    the call. The next run, or the next forward, then has to catch up.
    """

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)  # its object holds this one
        self._run = -1

    def expect(self) -> bool:
        """Queue the call, once for each run; return whether a run of backward is under way."""
        run = torch._C._current_graph_task_id()
        if run == -1:
            return False  # the program reads a saved tensor outside of backward
        if run != self._run and (method := self._method()) is not None:
            self._run = run  # the engine numbers its runs and never repeats a number
            Variable._execution_engine.queue_callback(method)
        return True
