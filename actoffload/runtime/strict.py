"""``strict=True``: a forward that saved something and moved nothing is an error that says what stayed and why."""

from __future__ import annotations

from collections import Counter

from ..errors import NothingOffloadedError
from ..tiers.accounts import Accounts


class MovedSince:
    """What was counted when a forward began."""

    def __init__(self, accounts: Accounts) -> None:
        self._before = accounts.packed_tensors, accounts.moved_bytes, Counter(accounts.kept_bytes)

    def check(self, accounts: Accounts, *, with_gradients: bool) -> None:
        """The forward has ended; ``with_gradients``: autograd should have saved something.

        Raises:
            NothingOffloadedError: nothing was moved.
        """
        packed, moved, kept = self._before
        saved = accounts.packed_tensors - packed
        if accounts.moved_bytes > moved or (saved == 0 and not with_gradients):
            return
        if saved == 0:
            raise NothingOffloadedError(
                "strict=True and autograd saved nothing inside the context: was the forward run inside it, with "
                "gradients enabled, and on tensors that need them?"
            )
        stayed = sorted((accounts.kept_bytes - kept).items())
        raise NothingOffloadedError(
            f"strict=True and nothing was moved: autograd saved {saved} tensors, all stayed "
            f"({', '.join(f'{reason}: {nbytes} bytes' for reason, nbytes in stayed) or 'no bytes'}). "
            "Lower min_bytes, widen include/exclude or the policy, or check target and devices"
        )
