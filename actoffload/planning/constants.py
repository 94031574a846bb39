"""The numbers by which the library makes, follows and corrects plans, each with its unit and its evidence.

Files lie in ``benchmarks/results``. "The loop" is `tests/unit/test_planner_loop.py`, many steps in virtual time. "The
property tests" are `tests/property/test_planners_property.py`. "100 plans" compared the step, or without a budget the
peak, with and without a number: plans without a budget and with three, for 18 profiles of
`tests.profiles.random_profile`, for the recorded profiles with a quarter of their disk, and for three transformers; the
results were not kept.
"""

from __future__ import annotations

# -- the cost and the gain of a plan ----------------------------------------------------------------------------------

NO_LOSS = 0.01
"""Share of keep's step. Without a budget a step may be longer by this: the property tests call it "no loss", and steps
under one plan differ by more. If steps wait longer than predicted by this, a link that was
not full counts as no faster than measured, and without a budget another plan is made: on an H100 a plan for 53 GB/s
waited for 15 of 496 ms. Regions run once if that makes a step shorter by this on paper: with 2 % the scaled Llama's
step took 1.000 and not 0.976 of checkpointing's with an NVMe disk. A plan that lowers keep's peak by less than this
share moves nothing."""
LEAST_GAIN_BYTES = 16 << 20
"""A plan that lowers keep's peak by fewer bytes moves nothing: a 2 × 128 GPT paid 9 to 29 % of a step to move 11 MiB,
and its process became 5 MiB smaller (``test_a_declined_plan_has_its_reason`` of `tests/unit/test_planners.py`)."""
PREFETCH_BYTES = 64 << 20
"""How far ahead of backward an offloader reads by default: `OffloadConfig.prefetch_bytes`."""

# -- the search -------------------------------------------------------------------------------------------------------
# "Recorded" are 96 plans of `tests/recorded` with a budget and 32 without, on four links each, "small" 100 random steps
# of at most ten storages, compared with all choices.

TRIES = 8
"""How often a search tries. It halves the open part of a cut through a list, which finds the cut to one part in 256. It
raises a budget to the floor of its last failure; after that the planner takes keep's peak."""
SPREAD = 5
"""How many numbers of a range the search tries first: both ends, the middle and the quarters. With 3, one in ten of 73
mixes of regions took 1.025 × as long or longer. With 9, one took 1.03 × as long, another was shorter by as much."""
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

# -- corrections ------------------------------------------------------------------------------------------------------
# Chosen on the loop, which fails with much larger values. Medians of five steps on a quiet machine differ by less.

REVIEW_STEPS = 5
"""Steps. A plan is compared with the median of this many, because single steps are noisy. One storage in as many steps
measures a link that the plan does not use."""
STEP_CHANGE = 0.05
"""Share of a step. If steps are longer or shorter than predicted by this, another step is recorded and planned from.
The loop allows 1.05 × the best."""
PEAK_CHANGE = 0.04
"""Share of a peak, likewise: ProTrain's error of prediction (arXiv 2406.08334)."""
LINK_CHANGE = 0.25
"""Share of a bandwidth. A link that is faster or slower by less counts as unchanged: the bandwidth of the loop's
undisturbed disk varies by 0.2."""
NOTICEABLE = 0.02
"""Share of a time or of a peak. A smaller difference changes nothing: a new plan must be better by this, so that two
similar plans do not alternate (200 steps of the loop), and an accelerator may idle for this in hooks: with 1 % the plan
of a Llama on an H100 fell from 7.6 to 1.1 GiB that leave, for a step of 468 ms and not 474. The storage that measures
an unused link is read back within this."""

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
"""Steps. The pause before another step is recorded doubles with each change in a row, up to this. As many steps run
without hooks in a row; then three to five steps have hooks again, which are 5 to 8 % of all."""
HOOKS_S = 10e-6
"""Seconds of the host that the hooks of a tensor which stays take: 8 µs above bare hooks (`micro_2026-11-26.json`)."""
MOST_KNOWN = 8
"""Shapes with a plan of their own, the last that were used, and for each the choices of regions with their plans and
profiles: those of a large model take a few MB each."""
MOST_REASONS = 100
"""Reasons for plans that the offloader remembers."""
OPERANDS = 2
"""Tensors, saved just before it, that backward needs to compute one again: a product has two factors."""

# -- one number for the whole device ----------------------------------------------------------------------------------

UNSEEN_STEPS = 8
"""Steps of a shape with ``device_memory`` that began without optimizer states, or without the gradients that other
steps accumulate. After this many, the planner waits for neither. With fewer, gradients that accumulate over as many
micro-batches would leave no room for the states that come after."""
TIGHTER = 0.9
"""The next step of a shape may save this share of the bytes that a step saved before it ran out of memory."""
