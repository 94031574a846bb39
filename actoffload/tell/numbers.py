"""The numbers by which reports and explanations are worded, each with its unit and its evidence."""

from __future__ import annotations

SLOW = 0.05
"""Share of the time. A step that waits for this much is slow."""
SMALL_PART = 0.2
"""Share of the peak. If saved activations are less, moving them changes little."""
MUCH_KEPT = 0.5
"""Share of the activations' peak. If this much stays, the report names a budget."""
MUCH_LATE = 0.2
"""Share of the activations' peak. If backward needs this much before it has left, that is a cause. The last tensors of
a forward never leave in time (an eighth in the virtual steps that a disk keeps up with)."""
LEAST_LATE = 1 << 20
"""Bytes. In steps of milliseconds, less is late by the disk's latency alone."""
WORTH_SAYING = 0.05
"""Share of a step. The report names another budget if the step is predicted to be shorter by this."""
PART_OF_WAITS = 0.25
"""Share of a slow step's waits. If this much goes to one thing, that is a cause."""
LARGE_FIRST = 0.1
"""Share of the activations' peak. If the first tensor that backward needs is smaller, a wait for it is blamed on the
link, which is behind."""
HELD = 0.05
"""Share of the activations' peak. If this many bytes stay for one reason, that is a cause."""
LEAST_OTHERS = 64 << 20
"""Bytes. If memory that is no saved tensor takes this much, that is a cause; libraries that a first step loads take
nearly as much."""
MOST_CAUSES = 3
"""Causes that a report names, each with one remedy."""
BUDGET_SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)
"""Shares of keep's peak in a table of budgets."""
NEARLY_ALL = 0.98
"""Share of a part's bytes. If this much moves, the part is shown as offloaded, without a number."""
MOST_ROWS = 24
"""Lines of parts at most; neighbours with the same decision share one."""
MOST_AT_PEAK = 3
"""How many modules with the most bytes at the peak a plan's explanation names."""
