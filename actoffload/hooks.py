"""The contexts: the only file that knows ``torch.autograd.graph.saved_tensors_hooks``."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Hashable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .agreement import agree
from .announcement import Announcement
from .assembly import Tiers
from .autopilot import Autopilot
from .blocks import BlockWatch
from .bursts import advice
from .config import OffloadConfig
from .device import Accelerator
from .errors import ConfigError, OffloaderClosedError
from .explanation import explain
from .packing import Packer, tell
from .phases import Direction, Hint, check_phase
from .profile import Profile
from .recompute_meter import RecomputeMeter
from .record import Record
from .schedule import Tape, new_tape
from .scopes import ModelInputs, untraced
from .strictness import Before

RELEARN_EVERY = 100
"""Without ``model=``, the live modules are looked through at the first entries and then every so many."""

_offloaders: weakref.WeakSet[Offloader] = weakref.WeakSet()


class _Entry:
    """One entry of a context in one thread."""

    def __init__(self, offloader: Offloader) -> None:
        self._pack, unpack = offloader._hooks()
        self.hooks = saved_tensors_hooks(self._pack, unpack)
        self.tape = new_tape()
        self.before = Before(offloader.core.accounts)

    @property
    def tape(self) -> Tape[Record]:
        """The forward that runs."""
        return self._tape

    @tape.setter
    def tape(self, tape: Tape[Record]) -> None:
        self._tape = tape
        tell(self._pack, tape)


class Offloader(Packer):
    """The long-lived object: ``with offloader:`` around each forward, ``close()`` at the end.

    Backward may run inside or outside the context. Contexts may be entered by several threads and nested.

    Args:
        config: the options.
        accelerator: drives the tensors' device instead of the real one; for tests.

    Raises:
        ConfigError: an option cannot work here.
        SpoolPathError: no spool can be made at ``path``.
    """

    def __init__(self, config: OffloadConfig, *, accelerator: Accelerator | None = None) -> None:
        super().__init__(config, accelerator)
        self._entries = threading.local()
        self._inputs = ModelInputs(self.notes)
        self._needs_names = bool(config.include or config.exclude) or not isinstance(config.policy, str)
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._entered = 0
        self._blocks = BlockWatch(self.recorder)
        self._autopilot: Autopilot | None = None
        if config.policy == "auto":
            meter = RecomputeMeter(self.core, self._movers.values(), self.notes)
            self._autopilot = Autopilot(
                self.core, self.tiers, self._placement, self._prefetch, self.recorder, self._blocks.blocks, meter
            )
        self._announcement = Announcement(config.announce)
        _offloaders.add(self)
        # Dropped without close(): its threads and files go too. Not at exit, where `_at_exit` does it.
        weakref.finalize(self, _close_later, self.tiers).atexit = False

    # -- the context --------------------------------------------------------------------------------------------------

    def use(self, model: nn.Module) -> Offloader:
        """Know a model: its parameters and buffers from the start, its inputs, and its modules' names where needed.

        Raises:
            ConfigError: ``model`` is no module.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError("model", model, "give an nn.Module, or leave it out")
        if model not in self._models:
            self._models.add(model)
            self._inputs.watch(model)
            if self._autopilot is not None:
                self._blocks.watch(model)
            if self._needs_names:
                self._scopes.watch(model)
        return self

    def forget(self, model: nn.Module) -> None:
        """Undo `use`: the model is as it was before, without a hook of ours. Idempotent."""
        self._models.discard(model)
        self._inputs.forget(model)
        self._scopes.forget(model)
        self._blocks.forget(model)
        if self._autopilot is not None:
            self._autopilot.forgot_blocks()

    @untraced
    def __enter__(self) -> Offloader:
        if self.closed:
            raise OffloaderClosedError("this offloader was closed; make another one")
        if (self.config.include or self.config.exclude) and not len(self._models):
            field = "include" if self.config.include else "exclude"
            raise ConfigError(field, getattr(self.config, field), "needs model= to know the modules' names")
        self._learn()
        self.tiers.begin_step()
        if self._autopilot is not None and self._plans_now():
            self._autopilot.between_steps()
        with self.core.lock:
            self._drain()
            self.core.accounts.steps += 1
        entry = _Entry(self)
        stack = self._stack()
        stack.append(entry)
        entry.hooks.__enter__()
        return self

    def _plans_now(self) -> bool:
        """Whether a step has ended, of which the device may be asked: not in a child, nor while a graph is captured."""
        return not self.forked and self.nothing_is_alive() and not self.tiers.capturing

    @untraced
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry = self._stack().pop()
        entry.hooks.__exit__(kind, error, trace)
        if kind is None:  # else it may be a generator's, closed by the collector inside of our own lock
            with self.core.lock:
                self._drain()
        said = advice(entry.tape.bursts, entry.tape.total_bytes)
        if said is not None:
            self.core.advise("burst", said)
        self.core.warn()
        if kind is not None:
            return
        if entry.tape.live and not entry.tape.in_backward:
            with self.core.lock:
                self._prefetch.after_forward(entry.tape)
        self._announcement.after_forward(self)
        if self.config.strict:
            entry.before.check(self.core.accounts, with_gradients=torch.is_grad_enabled())

    def stage(
        self, microbatch: Hashable, direction: Direction, *, next: tuple[Hashable, Direction] | None = None
    ) -> None:
        """Say that the forward or backward of a micro-batch begins now in this process: a pipeline schedule's hint.

        Without hints the order is learned in the first step. With them it is known from the start: a forward whose own
        backward follows at once keeps its tail, every other one moves it, and what the next backward wants first is
        fetched ahead.

        Args:
            microbatch: any key; where a process runs several model chunks, for example ``(chunk, microbatch)``.
            direction: ``"forward"`` (call it before the forward, outside or inside the context) or ``"backward"``.
            next: the key and the direction of what this process does after it, if that is known.

        Raises:
            ConfigError: an argument is none of these; names it.
        """
        check_phase("direction", "microbatch", (microbatch, direction))
        if next is not None:
            if not isinstance(next, tuple) or len(next) != 2:
                raise ConfigError(
                    "next", next, 'give (microbatch, "forward") or (microbatch, "backward"), or leave it out'
                )
            check_phase("next", "next", next)
        if direction == "forward":
            stack = self._stack()
            if stack and len(stack[-1].tape):
                stack[-1].tape = new_tape()
        with self.core.lock:
            self._drain()
            self._prefetch.expect(Hint(microbatch, direction, next))

    def agree(self, group: Any = None) -> bool:
        """Have all ranks of a group follow one plan, so that blocks can be recomputed where ranks communicate.

        Without it each rank plans for itself and none recomputes. A collective: every rank calls it between the same
        steps. From then on the plan stays until the next call.

        Args:
            group: ranks that run the same model on batches of one shape; None for all.

        Returns:
            Whether they follow one plan now; False, on all of them, while one has no plan of its own (the first ones
            come with the third step), or where they save different tensors, which is said once.

        Raises:
            StateError: a rank, which it names, is in the middle of a step, or has another policy; on all of them.
        """
        pilot = self._autopilot
        problem = "" if self.nothing_is_alive() else "what a forward saved is still alive: call it between steps"
        return agree(pilot, group, "it was closed" if self.closed else problem)

    def _stack(self) -> list[_Entry]:
        stack: list[_Entry] | None = getattr(self._entries, "stack", None)
        if stack is None:
            stack = self._entries.stack = []
        return stack

    def _learn(self) -> None:
        """Know the parameters and buffers as they are now."""
        self._entered += 1
        if len(self._models):
            for model in list(self._models):
                self.learn(model)
                if self._needs_names:  # again: modules may have been compiled since
                    self._scopes.watch(model)
        elif self._entered <= 2 or self._entered % RELEARN_EVERY == 0:
            self.learn(None)
        self.owners.note_storages(self.notes)

    def _tape(self) -> Tape[Record]:
        stack = self._stack()
        if not stack:  # hooks that PyTorch carried to one of its own threads
            stack.append(_Entry(self))
        entry = stack[-1]
        tape = entry.tape
        if tape.in_backward or (tape.live == 0 and len(tape)):
            tape = entry.tape = new_tape()
        return tape

    # -- the rest of the public surface -------------------------------------------------------------------------------

    def explain(self) -> str:
        """What was decided in the last forward, storage by storage, and why."""
        decided = explain(self.config, self.plan, self.statistics())
        return decided if self._autopilot is None else f"{self._autopilot.explain()}\n{decided}"

    @property
    def profile(self) -> Profile | None:
        """The step that was planned from, for ``actoffload plan`` (`Profile.save`); None before that."""
        return None if self._autopilot is None else self._autopilot.profile

    def close(self) -> None:
        """Take no more work and wait for what is under way. Idempotent.

        What is still alive stays usable: backward can still read it, and the disk space goes when its last handle dies.
        """
        self._scopes.remove()
        self._blocks.remove()
        if self._autopilot is not None:
            self._autopilot.recompute.undo()
        self._inputs.remove()
        super().close()


def _close_later(tiers: Tiers) -> None:
    """Close on a thread of its own: a finalizer may run on one of those that closing joins."""
    threading.Thread(target=tiers.close, kwargs={"wait": False}, name="actoffload-close", daemon=True).start()


def _at_exit() -> None:
    for offloader in list(_offloaders):
        offloader.abort()


def _in_child() -> None:
    for offloader in list(_offloaders):
        offloader.after_fork_in_child()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
