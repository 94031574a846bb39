"""Detect an autograd node that saves most of a forward, as a graph of ``torch.compile`` does. No torch here."""

from __future__ import annotations

MANY = 8
"""PyTorch's own operations save fewer storages than this; a compiled graph saves all its storages in one node."""


class SavedByNode:
    """The saves of one forward by autograd node: no storage of a node can leave while the node runs.

    Attributes:
        node_bytes: saved so far by the node that saved last.
        largest_bytes: the most that one node with `MANY` storages or more has saved.
    """

    def __init__(self) -> None:
        self.node_bytes = 0
        self.largest_bytes = 0
        self._node = -1
        self._count = 0

    def saved(self, node: int, nbytes: int) -> bool:
        """Count a new storage; return whether its node has saved `MANY` or more.

        Args:
            node: a number that differs between consecutive nodes.
            nbytes: bytes of the storage.
        """
        if node != self._node:
            self._node, self._count, self.node_bytes = node, 1, nbytes
            return False
        self._count += 1
        self.node_bytes += nbytes
        if self._count < MANY:
            return False
        self.largest_bytes = max(self.largest_bytes, self.node_bytes)
        return True

    def most_of(self, total_bytes: int) -> int:
        """Return the bytes of the node that saved more than half of a forward's ``total_bytes``; 0 if none has."""
        return self.largest_bytes if 2 * self.largest_bytes > total_bytes else 0
