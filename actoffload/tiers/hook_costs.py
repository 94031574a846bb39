"""The time that a device idles because our hooks keep its host busy, in the steps that are watched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..events import now
from .accelerator import Event
from .copy_streams import CopyStreams
from .shared import Shared

UNTIMED = contextlib.nullcontext()


class HookCosts:
    """Times hooks that move records, on one type of device. The caller holds the store's lock."""

    def __init__(self, shared: Shared, copies: CopyStreams) -> None:
        self._shared = shared
        self._copies = copies
        self._last_hook: Event | None = None
        """After all work of the compute stream by the end of the last hook, if that was watched."""
        self._behind_s = 0.0
        """By how much the hooks that were watched have put the host back since the device had caught up with it."""

    @contextlib.contextmanager
    def watched(self, index: int) -> Iterator[None]:
        """Return a context for a hook on device ``index`` that counts its time, and the device's idle time."""
        accounts, device, stopwatch = self._shared.accounts, self._copies.device, self._copies.stopwatch
        # A hook that the device did not notice, as it had work left, has put the host back all the same: where the
        # device has caught up by the time of a later hook, it has waited for that one as well.
        if self._last_hook is not None and device.done(self._last_hook):
            accounts.idle_s += self._behind_s
            self._behind_s = 0.0
        since_s, waited_s = now(), accounts.pack_wait_s + accounts.unpack_wait_s
        with stopwatch.hook() if stopwatch.running else UNTIMED:
            yield
        hook_s = now() - since_s - (accounts.pack_wait_s + accounts.unpack_wait_s - waited_s)
        accounts.hooks_s += hook_s
        self._behind_s += hook_s
        self._last_hook = device.record(device.current_stream(index))

    def forward_begins(self) -> None:
        """Forget the hooks before: they may be steps ago, and the device has had other work since."""
        self._behind_s, self._last_hook = 0.0, None
