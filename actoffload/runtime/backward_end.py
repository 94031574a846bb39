"""A call of autograd's engine at the end of a run of backward, once for each run."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable


class BackwardEnd:
    """Has a method called as the run of backward ends in which `expect` was called.

    The engine calls it on the thread that called backward, once every gradient is there. A run that raises ends without
    the call: the next one, or the next forward, has to do what was left.

    Args:
        method: is held weakly, as its object holds this one.
    """

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)
        self._run = -1

    def expect(self) -> bool:
        """Queue the call, unless that was done in this run; return whether a run of backward is under way."""
        run = torch._C._current_graph_task_id()
        if run == -1:
            return False  # somebody looks at a saved tensor outside of backward
        if run != self._run and (method := self._method()) is not None:
            self._run = run
            Variable._execution_engine.queue_callback(method)
        return True
