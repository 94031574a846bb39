"""``strict=True``: if a forward saves tensors and moves none, raise an error that lists each reason to stay."""

from __future__ import annotations

from collections import Counter

from ..errors import NothingOffloadedError
from ..tiers.accounts import Accounts


class MovedSince:
    """The counts at the beginning of a forward."""

    def __init__(self, accounts: Accounts) -> None:
        self._before = accounts.packed_tensors, accounts.moved_bytes, Counter(accounts.kept_bytes)

    def check(self, accounts: Accounts, *, with_gradients: bool) -> None:
        """Check a forward that has ended; ``with_gradients``: autograd should have saved tensors.

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
