"""The numbers by which plans are made, followed, corrected and explained, each with its unit and what it rests on.

Files lie in ``benchmarks/results``. "The loop" is `tests/unit/test_planner_loop.py`, many steps in virtual time, and
"the planner's property tests" are `tests/property/test_planners_property.py`. Of "100 plans" (of 18 profiles of
`tests.profiles.random_profile`, the recorded ones at a quarter of their disk, and three transformers, without a budget
and with three) the step, or without a budget the peak, was compared with and without a number; not kept.
"""

from __future__ import annotations

GIB = 1 << 30

# -- what a plan may cost, and what it has to gain --------------------------------------------------------------------

NO_LOSS = 0.01
"""Share of keep's step by which one may be slower without a budget and without ``max_slowdown``: "no loss" in the
planner's property tests, and less than what steps of one plan differ by. By so much regions that run once have to make
a step shorter on paper: with 2 % the scaled Llama's took 1.000 and not 0.976 of checkpointing's with an NVMe disk."""
SAFETY = 0.9
"""Share of the slow-down that is allowed which planners use, as a step is never quite as predicted: the simulator is
within 1 % of real steps in virtual time (`planner_cpu_virtual_2026-11-25.json`)."""
LEAST_GAIN = 0.01
"""Share of keep's peak. A peak that is lower by less is not worth moving anything ..."""
LEAST_GAIN_BYTES = 16 << 20
"""... nor is one that is lower by fewer bytes: a 2 × 128 GPT paid 9 to 29 % of a step to move 11 MiB, and its process
became 5 MiB smaller (``test_nothing_moves_where_next_to_nothing_is_gained`` of the loop)."""
PREFETCH_BYTES = 64 << 20
"""How far ahead of backward an offloader reads unless it is told otherwise: `OffloadConfig.prefetch_bytes`."""

# -- the search -------------------------------------------------------------------------------------------------------
# "Recorded" are 96 plans of `tests/recorded` with a budget and 32 without, on four links each, "small" 100 random steps
# of at most ten storages, compared with all choices.

CUT_TRIES = 8
"""How often what is open of a cut through a list is halved: it is found to within one part of 256."""
SPREAD = 5
"""How many numbers are tried at first between two: the ends, the middle and the quarters. With 3 one in ten of 73 mixes
of regions was later by 1.025 × or more, with 9 one by 1.03 × and another earlier by as much."""
SHARES_AHEAD = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Windows that are tried beside the profile's own, as shares of what a forward saves. One as large as all that is saved
has everything back before the peak. Without the nearest a recorded peak was 1.68 × as high. Under a budget the one
before the last is enough: recorded steps are the same with it and with all."""
TRIMS = 8
"""Storages of a cut, the largest, that are tried to be kept after all. With none 5 of the small steps under a budget
were more than 1.05 × the best, with these one."""
ALIKE_STEPS = 0.005
"""Share of a step by which steps are as long as each other, so that the one that moves less is better: a tenth of what
the loop allows."""
HOST_SHARE = 0.75
"""Share of the host budget that is filled with what is to stay there, with a disk below it: the rest is on its way.
With all of it, one of 100 plans was worse, by 1.11 ×."""

LEAST_TRIES = 4
"""How often the lowest budget that the planner keeps is looked for, from the floor up; then it is keep's peak."""

# -- corrections ------------------------------------------------------------------------------------------------------
# What follows was chosen on the loop, which fails with much larger values; the medians of five steps differ by less
# than these on a quiet machine.

REVIEW_STEPS = 5
"""Steps. A plan is compared with the median of so many, as single ones are noisy. A link that no plan uses is measured
as often, by one storage."""
PROBE_SHARE = 0.04
"""Share of a step that reading this storage back may take: backward waits for no more. The loop asks for steps within
1.05 × the best plan's; the first storage of a forward, whatever its size, had 1.17 ×."""
AFTER_A_CHANGE = 3
"""Steps. So many the first time under a corrected plan, which was made from steps before and after something had
changed: the loop asks for the best plan ten steps after each change."""
STEP_CHANGE = 0.05
"""Share of a step. One that takes so much longer or less than was predicted is recorded and planned again. The loop
allows 1.05 × the best."""
PEAK_CHANGE = 0.04
"""Share of a peak, likewise: ProTrain's error of prediction (arXiv 2406.08334)."""
LINK_CHANGE = 0.25
"""Share of a bandwidth. A link that is faster or slower by less is as it was: the loop's disk that is at rest varies by
0.2."""
WAIT_SHARE = 0.02
"""Share of a step. Where it waits for so much more than was predicted, a link that was not full is no faster than it
was."""
PLAN_GAIN = 0.02
"""Share of the time or of the peak by which a new plan has to be better than the old one to be followed: plans that are
alike do not take turns (200 steps of the loop)."""
MAX_COST_SHARE = 2.0
"""Share of a step. Bytes are never taken to cost more compute time, however late a step was: 9 to 29 % were seen."""

MEMORY_MARGIN = 0.03
"""Share of a device's free memory, or of what a checkpointed step saves, that a plan leaves free: an allocator's blocks
do not fit each other exactly. The scaled Llama had 1.010 × checkpointing's peak without, 0.992 × with it."""

# -- from step to step ------------------------------------------------------------------------------------------------

WARM_UP = 1
"""Steps before the one that is planned from: the first one allocates what the later ones use again."""
PLANNING_SHARE = 0.1
"""Share of the time that planning takes at most: a search takes a second, which is much for short steps."""
SHAPES_CHANGED = 0.1
"""Share of the saved bytes. A forward that saves so much at other places, or in other sizes, is not the planned one."""
MOST_REST = 64
"""Steps. Where shapes change all the time, at most so many pass before another one is recorded; half as many before."""
HOOKS_S = 10e-6
"""Seconds of the host that the hooks of a tensor which stays take: 8 µs above bare hooks (`micro_2026-11-26.json`)."""
REST_STEPS = 64
"""Steps without hooks before hooks look again: the three to five steps that they take then are 5 to 8 % of all."""
MOST_WAITED = 0.9
"""Share of a step that waits are taken to be at most: something was computed."""
ROOM_TO_KEEP = 1.5
"""A step that keeps all is tried only where so many times its peak is free."""
MOST_SHAPES = 8
"""Shapes that have a plan of their own, the last that were used; profiles of a large model take a few MB each."""
MOST_TRIED = 8
"""Choices of regions of a shape that are remembered with their plans and profiles, likewise."""
MOST_REASONS = 100
"""Reasons for plans that are remembered."""

# -- one number for the whole device ----------------------------------------------------------------------------------

UNSEEN_STEPS = 8
"""Steps of a shape with ``device_memory`` that began without optimizer states, or without the gradients that others
accumulate: then neither is waited for any more. With fewer, gradients that are accumulated over as many micro-batches
would leave no room for the states that come after."""
TIGHTER = 0.9
"""Share of what a step had saved that ran out of memory, which the next one of its shape may."""

# -- what people are told ---------------------------------------------------------------------------------------------

SLOW = 0.05
"""Share of the time. A step that waits for so much is slow."""
SMALL_PART = 0.2
"""Share of the peak. Where saved activations are less, moving them changes little."""
MUCH_KEPT = 0.5
"""Share of the activations' peak that stays from which on a budget is named."""
MUCH_LATE = 0.2
"""Share of the activations' peak. What backward asks for before it has left is a cause from there on: the last of a
forward always is (an eighth in the virtual steps that a disk keeps up with)."""
LEAST_LATE = 1 << 20
"""Bytes. Less is late by the disk's latency alone, in steps of milliseconds."""
WORTH_SAYING = 0.05
"""Share of a step that another budget is predicted to save where it is named."""
LOWER = 0.9
"""Share of the peak. Another budget is named to save memory if it lowers the peak to this share at least."""
PART_OF_WAITS = 0.25
"""Share of a slow step's waits from which on what they are for is a cause."""
LARGE_FIRST = 0.1
"""Share of the activations' peak from which on what backward asks for first is named: a wait for less is the link's,
which is behind."""
HELD = 0.05
"""Share of the activations' peak. Bytes that stay for one reason are a cause from there on."""
LEAST_OTHERS = 64 << 20
"""Bytes. What else fills the memory is a cause from there on: libraries that a first step loads take nearly as much."""
MOST_CAUSES = 3
"""Causes that a report names, each with one thing to do."""
NO_GAIN = 1e-4
"""Share of a step. What a larger budget saves is nothing if it is less."""
BUDGET_SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)
"""Shares of keep's peak that a table of budgets has."""
NEARLY_ALL = 0.98
"""Share of a part's bytes from which on it is said to be offloaded, without a number."""
MOST_ROWS = 24
"""Lines of parts at most; neighbours that are treated alike share one."""
MOST_MODULES, MOST_AT_PEAK = 8, 3
"""Modules with the most bytes at the peak that a prediction lists, and that a plan's explanation names."""
