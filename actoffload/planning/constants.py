"""The numbers by which the library makes, follows, corrects and explains plans, each with its unit and its evidence.

Files lie in ``benchmarks/results``. "The loop" is `tests/unit/test_planner_loop.py`, many steps in virtual time. "The
property tests" are `tests/property/test_planners_property.py`. "100 plans" compared the step, or without a budget the
peak, with and without a number: plans without a budget and with three, for 18 profiles of
`tests.profiles.random_profile`, for the recorded profiles with a quarter of their disk, and for three transformers; the
results were not kept.
"""

from __future__ import annotations

# -- the cost and the gain of a plan ----------------------------------------------------------------------------------

NO_LOSS = 0.01
"""Share of keep's step. Without a budget and without ``max_slowdown`` a step may be longer by this: the property tests
call it "no loss", and steps under one plan differ by more. Regions run once if that makes a step shorter by this on
paper: with 2 % the scaled Llama's step took 1.000 and not 0.976 of checkpointing's with an NVMe disk."""
SAFETY = 0.9
"""Share of the allowed slow-down that a plan uses, because predictions err: the simulator is within 1 % of real steps
in virtual time (`planner_cpu_virtual_2026-11-25.json`)."""
LEAST_GAIN = 0.01
"""Share of keep's peak. A plan that lowers the peak by less moves nothing ..."""
LEAST_GAIN_BYTES = 16 << 20
"""... nor does a plan that lowers it by fewer bytes: a 2 × 128 GPT paid 9 to 29 % of a step to move 11 MiB, and its
process became 5 MiB smaller (``test_nothing_moves_where_next_to_nothing_is_gained`` of the loop)."""
PREFETCH_BYTES = 64 << 20
"""How far ahead of backward an offloader reads by default: `OffloadConfig.prefetch_bytes`."""

# -- the search -------------------------------------------------------------------------------------------------------
# "Recorded" are 96 plans of `tests/recorded` with a budget and 32 without, on four links each, "small" 100 random steps
# of at most ten storages, compared with all choices.

CUT_TRIES = 8
"""How often the search halves the open part of a cut through a list. It finds the cut to one part in 256."""
SPREAD = 5
"""How many numbers of a range the search tries first: both ends, the middle and the quarters. With 3, one in ten of 73
mixes of regions took 1.025 × as long or longer. With 9, one took 1.03 × as long, another was shorter by as much."""
STAY_IN_PART = 2
"""The last regions that run again in part wherever any does: with them the scaled Llama's step in 5 % more memory is
0.899 of the base's on paper, with all of them evenly spread 0.903."""
SHARES_AHEAD = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Windows that the search tries beside the profile's own, as shares of the bytes that a forward saves. A window of all
these bytes has everything back before the peak. Without the smallest share a recorded peak was 1.68 × as high. Under a
budget the half alone is enough: recorded steps are the same as with all."""
TRIMS = 8
"""How many storages of a cut, the largest first, the search tries to keep after all. With none, 5 of the small steps
under a budget were more than 1.05 × the best; with these, one was."""
ALIKE_STEPS = 0.005
"""Share of a step. Among steps that differ by less, the one that moves least wins: a tenth of the loop's tolerance."""
HOST_SHARE = 0.75
"""Share of the host budget for storages that stay in host memory, if there is a disk below it. The rest is for storages
on their way to the disk. With 1, one of 100 plans was worse, by 1.11 ×."""

LEAST_TRIES = 4
"""How often the planner raises a budget to the floor of its last failure, to find the lowest budget that it keeps.
After that it takes keep's peak."""

# -- corrections ------------------------------------------------------------------------------------------------------
# Chosen on the loop, which fails with much larger values. Medians of five steps on a quiet machine differ by less.

REVIEW_STEPS = 5
"""Steps. A plan is compared with the median of this many, because single steps are noisy. One storage in as many steps
measures a link that the plan does not use."""
PROBE_SHARE = 0.04
"""Share of a step that reading this one storage back may take: backward waits no longer for it. The loop demands steps
within 1.05 × the best plan's. Probing with the first storage of a forward, whatever its size, took 1.17 ×."""
AFTER_A_CHANGE = 3
"""Steps before the first comparison with a corrected plan. It was made from steps before and after a change, and the
loop demands the best plan ten steps after each change."""
STEP_CHANGE = 0.05
"""Share of a step. If steps are longer or shorter than predicted by this, another step is recorded and planned from.
The loop allows 1.05 × the best."""
PEAK_CHANGE = 0.04
"""Share of a peak, likewise: ProTrain's error of prediction (arXiv 2406.08334)."""
LINK_CHANGE = 0.25
"""Share of a bandwidth. A link that is faster or slower by less counts as unchanged: the bandwidth of the loop's
undisturbed disk varies by 0.2."""
WAIT_SHARE = 0.02
"""Share of a step. If it waits longer than predicted by this, a link that was not full is no faster than measured."""
PLAN_GAIN = 0.02
"""Share of the time or of the peak by which a new plan must be better to replace the old one, so that two similar plans
do not alternate (200 steps of the loop)."""
MAX_COST_SHARE = 2.0
"""Share of a step. Moving is never taken to cost more compute time, however late a step was: 9 to 29 % were seen."""

MEMORY_MARGIN = 0.03
"""Share of a device's free memory, or of the bytes that a checkpointed step saves, that a plan leaves free, because an
allocator's blocks never fit exactly. The scaled Llama had 1.010 × checkpointing's peak without it, 0.992 × with it."""

# -- from step to step ------------------------------------------------------------------------------------------------

WARM_UP = 1
"""Steps before the one that is planned from: the first step allocates memory that later steps use again."""
PLANNING_SHARE = 0.1
"""Share of the time that planning takes at most: a search takes a second, which is long beside short steps."""
SHAPES_CHANGED = 0.1
"""Share of the saved bytes. If a forward saves this much at other places, or in other sizes, the plan is not for it."""
MOST_REST = 64
"""Steps. The pause before another step is recorded doubles with each change in a row, up to this."""
HOOKS_S = 10e-6
"""Seconds of the host that the hooks of a tensor which stays take: 8 µs above bare hooks (`micro_2026-11-26.json`)."""
DISPATCH_S = 15e-6
"""Seconds of the host for each operator of a region that runs in part, in each of its two runs: the mode that numbers
values takes 14 µs above a sine of 16 numbers, 7 above a view and 29 above an operator in place (one core, 2.13)."""
REST_STEPS = 64
"""Steps without hooks in a row. Then three to five steps have hooks again, which are 5 to 8 % of all."""
MOST_WAITED = 0.9
"""Share of a step that its waits can make up: the step computed something."""
ROOM_TO_KEEP = 1.5
"""A step keeps all, for comparison, only if this many times its peak is free."""
MOST_SHAPES = 8
"""Shapes with a plan of their own, the last that were used: profiles of a large model take a few MB each."""
MOST_TRIED = 8
"""Choices of regions that a shape remembers with their plans and profiles, for the same reason."""
MOST_REASONS = 100
"""Reasons for plans that the offloader remembers."""

# -- one number for the whole device ----------------------------------------------------------------------------------

UNSEEN_STEPS = 8
"""Steps of a shape with ``device_memory`` that began without optimizer states, or without the gradients that other
steps accumulate. After this many, the planner waits for neither. With fewer, gradients that accumulate over as many
micro-batches would leave no room for the states that come after."""
TIGHTER = 0.9
"""The next step of a shape may save this share of the bytes that a step saved before it ran out of memory."""

# -- reports and explanations -----------------------------------------------------------------------------------------

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
LOWER = 0.9
"""Share of the peak. The report names another budget for its memory if it lowers the peak to this share or less."""
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
MOST_MODULES, MOST_AT_PEAK = 8, 3
"""How many modules with the most bytes at the peak a prediction lists, and how many a plan's explanation names."""
