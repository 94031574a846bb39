"""``strict=True``: a forward that saved something and moved nothing is an error that says what stayed and why."""

from __future__ import annotations

from ..errors import NothingOffloadedError
from ..tiers.accounts import Accounts


class MovedSince:
    """What was counted when a forward began."""

    def __init__(self, accounts: Accounts) -> None:
        self._packed = accounts.packed_tensors
        self._moved = accounts.moved_bytes
        self._kept = dict(accounts.kept_bytes)

    def check(self, accounts: Accounts, *, with_gradients: bool) -> None:
        """The forward has ended.

        Args:
            accounts: as they are now.
            with_gradients: whether autograd should have saved something.

        Raises:
            NothingOffloadedError: nothing was moved.
        """
        packed = accounts.packed_tensors - self._packed
        if accounts.moved_bytes > self._moved or (packed == 0 and not with_gradients):
            return
        if packed == 0:
            raise NothingOffloadedError(
                "strict=True and autograd saved nothing inside the context: was the forward run inside it, with "
                "gradients enabled, and on tensors that need them?"
            )
        reasons = {
            reason: nbytes - self._kept.get(reason, 0)
            for reason, nbytes in accounts.kept_bytes.items()
            if nbytes > self._kept.get(reason, 0)
        }
        told = ", ".join(f"{reason}: {nbytes} bytes" for reason, nbytes in sorted(reasons.items()))
        raise NothingOffloadedError(
            f"strict=True and nothing was moved: autograd saved {packed} tensors, all stayed ({told or 'no bytes'}). "
            "Lower min_bytes, widen include/exclude or the policy, or check target and devices"
        )
