"""`Offloader`: the long-lived object that users create."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from ..autotune.agreement import agree
from ..autotune.autopilot import Autopilot
from ..autotune.blocks import find_blocks
from ..autotune.following import Following
from ..config import OffloadConfig
from ..errors import ConfigError, OffloaderClosedError, StateError
from ..planning.microbatches import Microbatches, Taken, propose_microbatches
from ..planning.plan import Plan
from ..planning.profile import Profile
from ..policy import module_patterns
from ..runtime.decision import InputShapes
from ..runtime.pipeline import Direction, Hint, check_phase
from ..runtime.store import ActivationStore
from ..runtime.tape import Tape
from ..runtime.untraced import untraced
from ..sizes import parse_size
from ..tell.facts import Facts
from ..tell.plans import explain_plans, regions_line, render_decisions
from ..tell.report import announcement, diagnose, explain_causes, render_report, say
from ..tiers.accelerator import Accelerator
from ..tiers.interrupts import expected, is_interrupt
from ..tiers.statistics import Statistics
from ..tiers.tiers import Tiers
from .checkpoints import REENTRANT, Checkpoints, install
from .entry import Entry
from .exclusions import Exclusions
from .foreign_hooks import taken_by_others
from .last_line import facts_so_far, sum_up, sum_up_at_end
from .module_names import PATTERNS, ModelInputs, ModuleScopes, check_patterns
from .packing import Forwards, Packer
from .recompute import Recompute, check

_stores: weakref.WeakSet[ActivationStore] = weakref.WeakSet()
"""The live stores. Handles keep a store alive even after its offloader is gone."""


FUNC_ADVICE = (
    "actoffload: its context is open here, and uses saved tensor hooks. Call torch.func's function inside of "
    "actoffload.no_offload(), or outside of the context"
)


class Offloader:
    """Enter ``with offloader:`` around each forward, and call ``close()`` at the end.

    Backward may run inside or outside the context. Contexts may be entered by several threads and nested.

    An interrupt (Ctrl-C) inside the library ends the step with that interrupt. The library releases host memory and
    disk, and the tensors of that step are lost. The next context starts afresh, with counts from zero.

    Args:
        config: the options.
        accelerator: drives the tensors' device instead of the real one; for tests.

    Attributes:
        config: the options.
        store: holds the saved tensors; a new one after an interrupt. ``packer`` and ``autopilot`` (None unless
            ``policy="auto"``) belong to one store.

    Raises:
        ConfigError: an option cannot work here.
        SpoolPathError: no spool can be made at ``path``.
    """

    store: ActivationStore
    packer: Packer
    autopilot: Autopilot | None

    def __init__(self, config: OffloadConfig, *, accelerator: Accelerator | None = None) -> None:
        self.config = config
        self._accelerator = accelerator
        self._forwards = Forwards()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._ended = self._announced = self._searched = False
        self._recompute = Recompute(config.recomputed)
        self._open()
        # An offloader that dies without `close()` restores its models.
        weakref.finalize(self, self._recompute.undo).atexit = False

    def _open(self) -> None:
        """Make the store and the objects that belong to it."""
        store = self.store = ActivationStore(self.config, self._accelerator)
        _stores.add(store)
        self.exclusions = Exclusions()
        self._module_names = ModuleScopes()
        self.packer = Packer(store, self.exclusions, self._module_names, self._forwards)
        self._checkpoints = Checkpoints(store, self.packer, self._forwards, self.exclusions, self._module_names)
        if self.config.checkpoints == "plan" and (refusal := install()):
            store.shared.reporter.advise("checkpoints", refusal)
        policy, following = self.config.policy, Following(store)
        self.autopilot, called = None, None
        if isinstance(policy, Plan):
            following.follow(policy)
            store.regions.expected = policy.regions or None
        elif policy == "auto":
            self.autopilot, called = Autopilot(store, following), weakref.WeakMethod(self._model_begins)
        self._inputs = ModelInputs(self.exclusions.static, called)
        if store.trace is not None:
            store.trace.ask = weakref.WeakMethod(self._known)
        # A store that dies without `close()` ends its threads and files. At exit `_at_exit` does that instead.
        weakref.finalize(store, _close_later, store.tiers).atexit = False

    def _open_anew(self) -> None:
        """Replace the store after an interrupt."""
        models = list(self._models)
        self._remove_hooks()
        self._open()
        for model in models:
            self._watch(model)

    # -- the context --------------------------------------------------------------------------------------------------

    def use(self, model: nn.Module) -> Offloader:
        """Watch a model: note its parameters, buffers and inputs, and its modules' names if the options need them.

        Raises:
            ConfigError: ``model`` is no module, or a pattern of an option matches none in it.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError("model", model, "give an nn.Module, or leave it out")
        if model not in self._models:
            check_patterns(self.config, [model, *self._models])
            check(self.config.recomputed, [model, *self._models])
            self._watch(model)
        return self

    def _watch(self, model: nn.Module) -> None:
        self._models.add(model)
        if self.store.trace is not None:
            self.store.trace.watch(model)
        self._inputs.watch(model)
        self._recompute.watch(model)
        if self._needs_names:
            self._module_names.watch(model)
        elif self.autopilot is not None:  # explanations name the blocks of a plan
            self._module_names.watch(model, only=set(find_blocks(model).values()))

    def forget(self, model: nn.Module) -> None:
        """Undo `use`, and remove our hooks from the model. Idempotent."""
        self._models.discard(model)
        self._inputs.forget(model)
        self._module_names.forget(model)
        self._recompute.forget(model)

    def note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note tensors that the program passes to a model. It holds them anyway, so they never move."""
        self._inputs.note(args, kwargs)

    @property
    def _needs_names(self) -> bool:
        named = any(getattr(self.config, field) for field in PATTERNS) or not isinstance(self.config.policy, str)
        return named or self.store.trace is not None

    @untraced
    def __enter__(self) -> Offloader:
        if self.closed:
            raise OffloaderClosedError("this offloader was closed; make another one")
        if self.store.shared.interrupted or self.store.tiers.lost:
            # The new store comes first: `speak` may raise, and the next entry must not find the old one again.
            ended = self.store
            self._open_anew()
            ended.speak()
        if not len(self._models):
            for field in PATTERNS:
                if module_patterns(getattr(self.config, field)):
                    raise ConfigError(field, getattr(self.config, field), "needs model= to know the modules' names")
            if self.config.recompute:
                raise ConfigError("recompute", self.config.recompute, "needs model= to know the modules' names")
        store, stack = self.store, self._forwards.stack
        depth = len(stack)
        try:
            with store.tiers.hook:  # as in `aborts_when_interrupted`: the whole call counts as one
                self._begin_step()
            entry = Entry(self.store, self.packer)
            stack.append(entry)
            if entry.hooks is not None:
                expected(entry.hooks.__enter__)  # PyTorch may refuse hooks here, which is no interrupt
        except BaseException as error:
            store.abort_if_interrupted(error)
            # An interrupt may have come just before or just after the append, so the stack itself decides.
            for left in stack[depth:]:
                left.remove_hooks()
            del stack[depth:]
            raise
        return self

    def _model_begins(self, shapes: InputShapes, signature: Callable[[], Hashable]) -> None:
        """Decide as a model's forward begins whether it rests; see `ModelInputs`."""
        assert self.autopilot is not None, "it needs the shapes"
        rests, stack = self.autopilot.model_begins(shapes, signature), self._forwards.stack
        if stack and rests:
            stack[-1].rest()
        elif stack:
            stack[-1].end_rest(self.packer)

    def _begin_step(self) -> None:
        store = self.store
        self.exclusions.learn(self._models)
        if self._needs_names:
            for model in list(self._models):  # at each step, as the program may have compiled modules since
                self._module_names.watch(model)
        store.tiers.begin_step()
        # Neither a forked child nor a thread that captures a graph may query the device.
        first = not (store.forked or store.tiers.capturing) and store.nothing_is_alive()
        with store.shared.lock:
            store.shared.budget.begin_forward(first=first)
        if first and self.autopilot is not None:
            planned = self.autopilot.between_steps()  # before `begin_forward`: the step counts for the plan chosen here
            if planned is not None:
                say(self.config, f"actoffload: {regions_line(planned)}")
        store.begin_forward(first=first)
        if store.trace is not None:
            store.trace.forward_begins()

    @untraced
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack = self._forwards.stack
        entry: Entry = stack[-1]
        try:
            del stack[-1]  # first, so that an error below leaves no entry behind
            if entry.rests:
                entry.remove_hooks()  # an interrupt in `end_rest` may have left them on the stack
            elif entry.hooks is not None:
                entry.hooks.__exit__(kind, error, trace)
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                error.add_note(FUNC_ADVICE)
            if isinstance(error, torch.OutOfMemoryError):
                self.store.out_of_memory.note(error, entry.tape.decisions)
            if self.store.shared.interrupted:
                self.store.speak()
            else:
                self._end_forward(entry, failed=kind is not None)
        except BaseException as reason:
            self.store.abort_if_interrupted(reason)
            entry.remove_hooks()
            raise

    def _end_forward(self, entry: Entry, *, failed: bool) -> None:
        store, tape = self.store, entry.tape
        if store.trace is not None:
            store.trace.forward_ended()
        # Not after a failure: the garbage collector may close a generator's context amid a change under our own lock.
        if not failed:
            accounts = store.shared.accounts
            store.count_deferred()  # before the lock is taken: an interrupt in it releases the lock completely
            with store.shared.lock:
                accounts.unhooked += entry.rests
                accounts.at_once_bytes = max(accounts.at_once_bytes, tape.by_node.most_of(tape.total_bytes))
            self._note_reentrant(entry)
        unmatched = store.decision.names.unmatched() if tape.live else []
        if unmatched:
            given = ", ".join(f"tensor:{pattern}" for pattern in unmatched)
            store.shared.reporter.advise("names", f"no saved tensor was given a name() for these patterns: {given}")
        store.shared.reporter.warn()
        if failed:
            return
        store.regions.forward_ended(tape)
        if tape.live and not tape.in_backward:
            with store.shared.lock:
                store.tiers.count_alive()
                store.prefetch.after_forward(tape)
        if not self._announced and store.shared.accounts.packed_tensors:
            self._announced = True
            if self.config.announce != "none":
                say(self.config, announcement(self._facts()))

    @untraced
    def search_for_hooks(self, output: object, first: int) -> None:
        """Advise if hooks of the program's own took tensors of the first forward; see `taken_by_others`."""
        if self._searched or not torch.is_grad_enabled():
            return
        try:
            advice = expected(taken_by_others, output, first)
        except Exception as error:  # the output may hold any objects, whose code raises what it likes
            if is_interrupt(error):
                raise
            advice = ""
        self._searched = advice is not None
        if advice:
            self.store.shared.reporter.advise("hooks", advice)

    def _note_reentrant(self, entry: Entry) -> None:
        """Report once how many checkpoints of a forward leave a plan no choice."""
        reporter = self.store.shared.reporter
        chooses = self.autopilot is not None or isinstance(self.config.policy, Plan)
        if entry.reentrant and chooses and "reentrant" not in reporter.advice:
            text = REENTRANT.format(entry.reentrant)
            reporter.advise("reentrant", text, logging.INFO)
            say(self.config, f"actoffload: {text}")

    def stage(
        self, microbatch: Hashable, direction: Direction, *, next: tuple[Hashable, Direction] | None = None
    ) -> None:
        """Announce that the forward or backward of a micro-batch begins in this process: a pipeline schedule's hint.

        Without hints the library learns the order in the first step. With them it knows the order from the start. A
        forward keeps its tail if its own backward follows at once, every other forward moves it, and the library
        fetches ahead the tensors that the next backward needs first.

        Args:
            microbatch: any key, for example ``(chunk, microbatch)`` if a process runs several model chunks.
            direction: ``"forward"`` (call it before the forward, outside or inside the context) or ``"backward"``.
            next: the key and the direction of the phase that follows in this process, if known.

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
            stack = self._forwards.stack
            if stack and len(stack[-1].tape):
                stack[-1].tape = Tape()
        self.store.expect(Hint(microbatch, direction, next))

    def traced(
        self, name: str, *, link: Literal["", "host write", "host read"] = "", nbytes: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context that the trace shows, for work that hooks do not see. It does nothing without a trace.

        Args:
            name: the name of a phase or of a copy.
            link: the way of a copy by the program itself, from the device or to it; "" for a phase.
            nbytes: the bytes of the copy.
        """
        trace = self.store.trace
        return contextlib.nullcontext() if trace is None else trace.region(name, link, nbytes)

    def microbatches(self, memory: int | str, *, batch: int, count: int = 1, samples: int) -> Microbatches:
        """Propose the size and the number of micro-batches for a step of `schedules.layer_major`, from a step of it.

        Call it between steps that follow a plan. The peak is that since the last
        ``torch.accelerator.reset_peak_memory_stats()``; without an accelerator memory means saved tensors alone.

        Args:
            memory: most memory on the device, in bytes or as text such as ``"24GB"``.
            batch: samples of a micro-batch in the last step; ``count``: its micro-batches.
            samples: the most samples of a step.

        Returns:
            ``size`` and ``count``, the ``device_bytes`` that this takes, and the ``movable_bytes`` of such a step.

        Raises:
            ConfigError: there is no plan yet, a number is below 1, or nothing fits.
        """
        for name, value in (("batch", batch), ("count", count), ("samples", samples)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(name, value, "give a number of 1 or more")
        facts = None if self.autopilot is None else self.autopilot.facts()
        profile = None if facts is None else facts.shape.profile
        if facts is None or profile is None:
            raise ConfigError("policy", self.config.policy, 'needs policy="auto", and steps until the first plan')
        fixed, peak = self.store.tiers.in_use() or (0, self.statistics().plan_peak_bytes)
        taken = Taken(profile=profile, batch=batch, count=count, fixed_bytes=fixed, peak_bytes=peak)
        return propose_microbatches(taken, facts.limits, parse_size("memory", memory), samples)

    def agree(self, group: Any = None) -> bool:
        """Have all ranks of a group run the same checkpointed regions once: those that the first rank has chosen.

        Without it a region in which ranks communicate runs again on each rank. A collective: every rank calls it
        between the same steps. The choice holds, in every step and shape, until the next call.

        Args:
            group: ranks that run the same model on batches of one shape; None for all.

        Returns:
            Whether the ranks agree. False on all ranks while one has no plan of its own (the first plans come with the
            third step), or if they save different tensors, which one line of the report names.

        Raises:
            StateError: on all ranks, if one is in the middle of a step or has another policy; names that rank.
        """
        alive = not self.store.nothing_is_alive()
        problem = "what a forward saved is still alive: call it between steps" if alive else ""
        return agree(self.autopilot, group, "it was closed" if self.closed else problem)

    # -- statistics and reports ---------------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Return the counts since the offloader began, or since the last interrupt."""
        return self.store.statistics()

    def report(self) -> str:
        """Return the run's counts and their reasons as text, with limits and remedies last."""
        facts = self._facts()
        return "\n".join([render_report(facts), *diagnose(facts)])

    def sum_up(self, *, at_end: bool = False) -> None:
        """Write the run in one line, where the option ``announce`` directs it.

        Args:
            at_end: not now, but as the process ends, or before that as the offloader dies.
        """
        if at_end:
            sum_up_at_end(self)
        else:
            sum_up(vars(self))

    def _facts(self) -> Facts:
        return facts_so_far(self.store, self.autopilot)

    def _known(self) -> dict[str, Any]:
        """The facts of the whole run that a trace stores."""
        return {**self._facts().as_dict(), "plan": json.loads(self.plan.to_json()), "report": self.report()}

    def explain(self, *, tensors: bool = False) -> str:
        """Return the run in one line, the causes of lost time and of high memory, and the plan with its reasons.

        Args:
            tensors: add each decision of the last forward.
        """
        facts = self._facts()
        found = [facts.summary] if facts.counts.packed_tensors else []
        found += explain_causes(facts)
        if self.autopilot is not None:
            found.append(explain_plans(self.autopilot.facts()))
        if self.plan.entries or not facts.counts.packed_tensors:
            found.append(render_decisions(self.plan, self.config.target, each=tensors))
        return "\n".join(found)

    @property
    def plan(self) -> Plan:
        """The decisions of the last forward, as data. An offloader with ``policy=plan`` follows them."""
        pilot = self.autopilot
        if pilot is not None and pilot.plan is not None and pilot.facts().rest:
            return pilot.plan  # the forward had no hooks, so nothing was decided for each tensor
        return self.store.plan

    @property
    def plan_history(self) -> tuple[str, ...]:
        """The reason for each of the last plans, oldest first; empty without a planner."""
        return () if self.autopilot is None else tuple(self.autopilot.history)

    @property
    def is_tracing(self) -> bool:
        """Whether the option ``trace`` or ``ACTOFFLOAD_TRACE`` is set."""
        return self.store.trace is not None

    @property
    def profile(self) -> Profile | None:
        """The recorded step behind the plan, for ``actoffload plan`` (`Profile.save`); None before the first plan."""
        return None if self.autopilot is None else self.autopilot.profile

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the offloader takes no more tensors. An interrupt does not close it, as the next context restarts."""
        return self._ended or (self.store.closed and not self.store.shared.interrupted)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the process that made the offloader."""
        return self.store.forked

    def synchronize(self) -> None:
        """Wait until every copy and write that has begun has ended.

        Raises:
            StateError: a policy, an engine or a trace callable calls it, for which the offloader itself waits.
        """
        self._check_caller("synchronize")
        self.store.synchronize()

    def _check_caller(self, method: str) -> None:
        if self.store.shared.lock.owned():
            raise StateError(
                f"{method}() was called by a policy, an engine or a trace callable, under the offloader's lock: "
                "call it outside of them"
            )

    def close(self) -> None:
        """Take no more tensors, and wait for copies and writes under way. Idempotent.

        Backward can still read the tensors that are alive. Their disk space is released with their last handle.

        Raises:
            StateError: as `synchronize`.
        """
        self._check_caller("close")
        self._remove_hooks()
        self._ended = True  # before the wait: no other thread may enter a context meanwhile
        self.store.close()

    def abort(self) -> None:
        """Stop at once: cancel queued transfers and release everything. Tensors not in memory are lost. Idempotent.

        Raises:
            StateError: as `synchronize`.
        """
        self._check_caller("abort")
        self._ended = True
        self.store.abort()

    def _remove_hooks(self) -> None:
        self._module_names.remove()
        self._recompute.undo()
        self._inputs.remove()


def _close_later(tiers: Tiers) -> None:
    """Close on a new thread, because closing joins threads and this finalizer may run on one of them."""
    with contextlib.suppress(RuntimeError):  # the system starts no more threads: the end of the process closes it
        threading.Thread(target=tiers.close, kwargs={"wait": False}, name="actoffload-close", daemon=True).start()


def _at_exit() -> None:
    for store in list(_stores):
        store.abort()


def _in_child() -> None:
    for store in list(_stores):
        store.after_fork_in_child()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
