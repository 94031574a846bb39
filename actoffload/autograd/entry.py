"""One entry of an offloader's context in one thread: its hooks, and the forward that runs in it."""

from __future__ import annotations

from torch.autograd import graph

from ..runtime.regions import Region
from ..runtime.store import ActivationStore
from ..runtime.tape import Tape
from ..tiers.interrupts import expected
from ..tiers.record import Record
from .hook_stack import Hooks, Pair, enabled, top
from .packing import Packer

MUTATION_ADVICE = (
    "nothing moves inside torch.autograd.graph.allow_mutation_on_saved_tensors(), which has to see every tensor that "
    "is saved; leave it out, or use no actoffload context in it"
)


class Entry:
    """One entry of a context in one thread.

    Attributes:
        hooks: the pushed pair. None while the forward rests, and if PyTorch permits no hooks here: then the library
            leaves the forward alone.
        rests: whether the forward runs without hooks, as nothing would move.
        tape: the tape of the running forward.
        region: the running checkpointed region, with all that it calls; None outside of regions.
        reentrant: the number of reentrant checkpoints so far.
    """

    def __init__(self, store: ActivationStore, packer: Packer) -> None:
        alone = not enabled()
        if getattr(graph, "_allow_mutation_on_saved_tensors_enabled", False):
            store.shared.reporter.advise("mutation", MUTATION_ADVICE)
            alone = True
        self.rests = False
        self._below: Pair | None = None
        self.hooks = None if alone else Hooks(*packer.hooks())
        self.tape: Tape[Record] = Tape()
        self.region: Region | None = None
        self.reentrant = 0

    def rest(self) -> None:
        """Let the forward continue without hooks if ours are on top. Only then can `end_rest` push them again."""
        above = top()
        if self.hooks is not None and above is not None and above[0] is self.hooks.pack_hook:
            # The flag comes first: if an interrupt follows, `__exit__` removes our pair and never pops another one.
            self.rests = True
            self.hooks.remove()
            self.hooks, self._below = None, top()

    def end_rest(self, packer: Packer) -> None:
        """Save the rest of the forward through our hooks, unless another pair was pushed since they were removed."""
        if self.rests and top() == self._below:
            self.hooks = Hooks(*packer.hooks())
            expected(self.hooks.__enter__)
            self.rests = False  # last, for the same reason as in `rest`

    def remove_hooks(self) -> None:
        """Take the hooks off autograd's stack if they are on it: after an interrupt either is possible."""
        if self.hooks is not None:
            self.hooks.remove()
