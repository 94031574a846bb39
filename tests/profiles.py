"""Profiles on paper: transformers by their shape, and random ones by a seed. For tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from actoffload.planning.plan import Plan
from actoffload.planning.profile import Link, Profile, Region, Storage
from actoffload.planning.regions import run_again
from actoffload.planning.transfers import Device
from actoffload.policy import part_of

SAVED_PER_BLOCK = (
    ("norm1", 1.0, 0.00),
    ("attention.qkv", 1.0, 0.02),
    ("attention.core", 3.0, 0.25),
    ("attention.core", 1.0, 0.33),
    ("norm2", 1.0, 0.40),
    ("mlp.up", 1.0, 0.42),
    ("mlp.act", 4.0, 0.68),
    ("mlp.down", 4.0, 0.72),
)
"""Saved tensors of a transformer block: module, size in batch × sequence × width, and when in its forward (share)."""


def scaled(link: Link, factor: float) -> Link:
    """The same link with ``factor`` times its bandwidth."""
    write, read = link.write_bytes_per_s * factor, link.read_bytes_per_s * factor
    return replace(link, write_bytes_per_s=write, read_bytes_per_s=read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A device on paper: FLOP/s that its kernels reach, and its links in bytes per second."""

    name: str
    flops: float
    host: Link | None
    disk: Link | None


def link(write_gb_s: float, read_gb_s: float | None = None) -> Link:
    """A link by GB/s each way; one number stands for both ways."""
    read = write_gb_s if read_gb_s is None else read_gb_s
    return Link(write_bytes_per_s=write_gb_s * 1e9, read_bytes_per_s=read * 1e9, latency_s=20e-6)


def transformer_profile(
    width: int,
    layers: int,
    batch: int,
    *,
    sequence: int = 1024,
    shards: int = 1,
    element_bytes: int = 2,
    vocabulary: int = 50_000,
    accelerator: Accelerator,
) -> Profile:
    """A step of a transformer with FlashAttention: its blocks, and a head whose logits live briefly.

    Args:
        width: hidden size.
        layers: number of blocks.
        batch: sequences of one micro-batch.
        sequence: tokens of each.
        shards: tensor parallel ways, which divide a device's saved bytes and its compute.
        element_bytes: bytes of an activation's element.
        vocabulary: rows of the head.
        accelerator: the device.
    """
    tokens = batch * sequence
    block_s = 2 * tokens * (12 * width * width + sequence * width) / shards / accelerator.flops
    head_s = 2 * tokens * width * vocabulary / shards / accelerator.flops
    forward_s = layers * block_s + head_s
    end_s = forward_s * 3
    unit = tokens * width * element_bytes // shards
    storages: list[Storage] = []
    for layer in range(layers):
        storages += _block_storages(layer, block_s, end_s, unit)
    logits = tokens * vocabulary * element_bytes // shards
    for module, nbytes, share in (("head", unit, 0.0), ("loss", logits, 1.0)):
        birth_s = layers * block_s + share * head_s
        last_s = max(birth_s, end_s - 2 * birth_s)
        index = len(storages)
        storages.append(
            Storage(index=index, nbytes=nbytes, birth_s=birth_s, need_s=last_s, last_need_s=last_s, module=module)
        )
    return Profile(
        storages=tuple(storages),
        host=accelerator.host,
        disk=accelerator.disk,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        device="cuda",
        prefetch_bytes=128 << 20,
    )


def slow_profile() -> Profile:
    """A transformer on a machine whose disk and compute are both slow."""
    accelerator = Accelerator(name="slow", flops=1e12, host=None, disk=link(1.0, 2.0))
    return transformer_profile(1024, 6, 4, sequence=512, accelerator=accelerator, element_bytes=4)


def _block_storages(layer: int, block_s: float, end_s: float, unit: int) -> list[Storage]:
    """The storages that one block saves; backward takes twice as long as forward and ends at ``end_s``."""
    storages = []
    for number, (module, units, share) in enumerate(SAVED_PER_BLOCK):
        birth_s = (layer + share) * block_s
        last_s = max(birth_s, end_s - 2 * birth_s)
        storages.append(
            Storage(
                index=layer * len(SAVED_PER_BLOCK) + number,
                nbytes=int(units * unit),
                birth_s=birth_s,
                need_s=max(birth_s, last_s - 0.5 * (1 - share) * block_s),
                last_need_s=last_s,
                module=f"layers.{layer}.{module}",
            )
        )
    return storages


def random_profile(seed: int, *, storages: int | None = None, blocks: int | None = None) -> Profile:
    """A random step that could be: blocks, loose storages, some unmovable, any mix of links; the same for one seed.

    Args:
        seed: of the random numbers.
        storages: how many; None for 1 to 60.
        blocks: how many; None for 0 to 6.
    """
    rng = random.Random(seed)
    count = rng.randint(1, 60) if storages is None else storages
    block_count = min(count, rng.randint(0, 6) if blocks is None else blocks)
    forward_s = rng.uniform(0.01, 1.0)
    backward_s = forward_s * rng.uniform(1.0, 3.0)
    births = sorted(rng.uniform(0, forward_s) for _ in range(count))
    sizes = [int(2 ** rng.uniform(16, 26)) for _ in range(count)]
    bounds = sorted(rng.sample(range(1, count), min(block_count, count - 1))) if count > 1 else []
    owners = [sum(bound <= number for bound in bounds) for number in range(count)]
    total_blocks = len(bounds) if block_count else 0
    made = []
    for number, (birth_s, owner) in enumerate(zip(births, owners, strict=True)):
        last_s = forward_s + (forward_s - birth_s) * backward_s / forward_s  # backward mirrors forward
        need_s: float | None = max(forward_s, last_s - rng.uniform(0, 0.05) * backward_s)
        if rng.random() < 0.05:
            need_s, last_s = None, rng.uniform(birth_s, forward_s + backward_s)
        kept = "module excluded" if rng.random() < 0.05 else ""
        inside = 0 < owner <= total_blocks and rng.random() < 0.95
        module = f"blocks.{owner - 1}.{number}" if inside else f"part{number}"
        storage = Storage(index=None, nbytes=sizes[number], birth_s=birth_s, need_s=need_s, last_need_s=last_s)
        made.append(replace(storage, module=module, kept=kept))
    listed = []
    index = 0
    for storage in made:
        indexed = rng.random() >= 0.05
        listed.append(replace(storage, index=index if indexed else None))
        index += indexed
    bandwidth = sum(sizes) / forward_s * 10 ** rng.uniform(-1.5, 1.0)
    kind = rng.choice(("disk", "host", "tiered"))
    return Profile(
        storages=tuple(listed),
        host=None if kind == "disk" else _random_link(rng, bandwidth * rng.uniform(1, 4)),
        disk=None if kind == "host" else _random_link(rng, bandwidth),
        forward_s=forward_s,
        backward_s=backward_s,
        other_s=rng.choice((0.0, 0.1 * forward_s)),
        device="cpu" if kind == "disk" else "cuda",
        prefetch_bytes=rng.choice((1 << 20, 16 << 20, 64 << 20)),
    )


def _random_link(rng: random.Random, bandwidth: float) -> Link:
    return Link(
        write_bytes_per_s=bandwidth,
        read_bytes_per_s=bandwidth * rng.uniform(0.8, 2.0),
        latency_s=rng.choice((0.0, 20e-6, 100e-6)),
    )


def regions_once(profile: Profile) -> tuple[Profile, dict[int, int]]:
    """The step with each block checkpointed, all of them run once; and by region the storage that is its input.

    A block is a part of the model that has a number. Its input is the first that it saves and that may move.
    """
    storages, regions, inputs = list(profile.storages), [], {}
    parts: dict[str, list[int]] = {}
    for number, storage in enumerate(storages):
        part = part_of(storage.module)
        if part[-1].isdigit() and storage.movable:
            parts.setdefault(part, []).append(number)
    begins = [storages[own[0]].birth_s for own in parts.values()]
    for place, ((name, own), until_s) in enumerate(zip(parts.items(), [*begins, profile.forward_s][1:], strict=True)):
        inputs[place] = own[0]
        for number in own[1:]:
            storages[number] = replace(storages[number], region=place)
        end_s = max([until_s, *(storages[number].birth_s for number in own)])
        regions.append(
            Region(place=place, name=name, begin_s=begins[place], end_s=end_s, backward_end_s=profile.step_s)
        )
    return replace(profile, storages=tuple(storages), regions=tuple(regions)), inputs


def checkpointed(profile: Profile) -> Profile:
    """The step with each block checkpointed, all of them run again."""
    return run_again(*regions_once(profile), {})


@contextmanager
def bytes_over_time() -> Iterator[list[tuple[float, int]]]:
    """Note the bytes on the device from each moment on, in the step that is simulated meanwhile."""
    found: list[tuple[float, int]] = []
    take = Device.take

    def note(device: Device, nbytes: int, now: float) -> None:
        take(device, nbytes, now)
        found.append((now, device.used))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "take", note)
        yield found


def predicted_s(plan: Plan) -> float:
    """The step under a plan, which has it."""
    assert plan.predicted_step_s is not None
    return plan.predicted_step_s


def predicted_peak(plan: Plan) -> int:
    """The peak under a plan, which has it, in bytes."""
    assert plan.predicted_peak_bytes is not None
    return plan.predicted_peak_bytes
