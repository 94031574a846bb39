"""Detect an autograd node that saves most of a forward, as a graph of ``torch.compile`` does. No torch here."""

from __future__ import annotations

from ..sizes import format_size

MANY = 8
"""PyTorch's own operations save fewer storages than this; a compiled graph saves all its storages in one node."""


class SavedByNode:
    """The saves of one forward by autograd node: no storage of a node can leave while the node runs.

    Attributes:
        node_bytes: saved so far by the node that saved last.
        largest_bytes: the most that one node with `MANY` storages or more has saved.
        largest_count: the number of that node's storages.
    """

    def __init__(self) -> None:
        self.node_bytes = 0
        self.largest_bytes = 0
        self.largest_count = 0
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
        if self.node_bytes > self.largest_bytes:
            self.largest_bytes, self.largest_count = self.node_bytes, self._count
        return True


def advice(saved: SavedByNode, total_bytes: int) -> str | None:
    """Return an advice if one node saved more than half of a forward's ``total_bytes``, else None."""
    if 2 * saved.largest_bytes <= total_bytes or not saved.largest_bytes:
        return None
    return (
        f"{format_size(saved.largest_bytes)} of the {format_size(total_bytes)} that this forward saved "
        f"({saved.largest_bytes / total_bytes:.0%}, {saved.largest_count} tensors) were saved by one autograd node, "
        "as a graph of torch.compile does for a whole model. All of it is in memory when that node's forward ends "
        "and again when its backward begins, so the peak does not fall below it, and module names inside it are "
        "not known. Compile block by block (for block in model.blocks: block.compile()), then the peak falls"
    )
