"""`Statistics`: an offloader's counts since it began, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ..policy import STATIC, KeepReason


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Counts since the offloader began. Bytes, unless the name ends otherwise; times in seconds.

    >>> Statistics(steps=2, packed_bytes=100, nvme_written_bytes=90).moved_share
    0.9
    """

    steps: int = 0
    """Forward passes inside the offloader's contexts (a count)."""
    packed_tensors: int = 0
    """Tensors that autograd saved (a count); one storage saved twice counts twice."""
    packed_bytes: int = 0
    """The bytes of these tensors, each counted in full."""
    deduplicated_bytes: int = 0
    """The part of ``packed_bytes`` that an earlier save of the same storage already held."""
    halved_bytes: int = 0
    """Bytes that ``codec`` did not save: half of each float32 tensor that was cast from bfloat16. No other
    field counts them."""
    fp8_bytes: int = 0
    """Bytes that ``fp8`` did not save: the tensors that it named, less their codes. No other field counts them."""
    derived_bytes: int = 0
    """Bytes that ``codec`` did not save, because backward computes them again: products and activations. No
    other field counts them."""
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that stayed where they were, by reason."""
    host_written_bytes: int = 0
    """Copied from the device to host memory."""
    host_read_bytes: int = 0
    """Copied from host memory back to the device."""
    nvme_written_bytes: int = 0
    """The storage engine's actual writes, alignment included."""
    nvme_read_bytes: int = 0
    """The storage engine's actual reads, alignment included."""
    forwarded_bytes: int = 0
    """Returned to backward from a copy that was nearer than the tier to which the storage was moving."""
    cancelled_bytes: int = 0
    """Writes that were dropped before they began."""
    resident_peak_bytes: int = 0
    """The most activation bytes that were on the device at once."""
    baseline_peak_bytes: int = 0
    """As ``resident_peak_bytes``, in the same run with nothing moved."""
    host_peak_bytes: int = 0
    """The most host memory in use for activations at once."""
    nvme_peak_bytes: int = 0
    """The most disk space in use for activations at once."""
    pack_wait_s: float = 0.0
    """Time that forward, or an accelerator's stream, waited for room. If a stream waits often in a step, and the policy
    is not ``"auto"``, a part of its waits is timed and stands for all of them (0.6 % off in a step of 368)."""
    unpack_wait_s: float = 0.0
    """Time that backward, or an accelerator's stream, waited for data; see ``pack_wait_s``."""
    live_records: int = 0
    """Saved storages that are alive now (a count)."""
    degraded: Mapping[str, int] = field(default_factory=dict)
    """Failed operations on disk or memory after which the step continued (a count), by reason."""
    unhooked: int = 0
    """The part of ``steps`` that ran without hooks, as nothing moves (a count). No other field counts them."""
    microbatches: int = 0
    """Forward passes with hooks in which autograd saved a tensor that may move (a count)."""
    optimizer_steps: int = 0
    """Steps of a ``torch.optim.Optimizer`` after such forward passes (a count); several at once count once."""
    plan_peak_bytes: int = 0
    """As ``resident_peak_bytes``, since the offloader follows its present plan."""
    regions: int = 0
    """Checkpointed regions of the last forward pass that this offloader may let run once (a count)."""
    regions_once: int = 0
    """The part of ``regions`` that ran once, so that backward did not run them again (a count)."""
    recompute_peak_bytes: int = 0
    """The most that regions which ran again in backward held at once; part of ``resident_peak_bytes``."""
    process_peak_bytes: int = field(default=0, compare=False)
    """The most resident memory of this process since the program began, as the system counts it, even before there was
    an offloader. On Linux it is ``VmHWM``, which begins anew when ``5`` is written to ``/proc/self/clear_refs``."""
    process_before_bytes: int = field(default=0, compare=False)
    """Resident memory of this process when the first forward pass began."""
    device_peak_bytes: int = field(default=0, compare=False)
    """The most memory of PyTorch on the current accelerator, parameters included, since the program began or the last
    ``torch.accelerator.reset_peak_memory_stats()``. 0 if no tensors of an accelerator move."""

    @property
    def saved_bytes(self) -> int:
        """Distinct bytes that autograd saved."""
        return self.packed_bytes - self.deduplicated_bytes

    @property
    def activation_bytes(self) -> int:
        """``saved_bytes`` without tensors that live anyway: parameters, buffers and the model's inputs."""
        return self.saved_bytes - sum(self.kept_bytes.get(reason, 0) for reason in STATIC)

    @property
    def moved_bytes(self) -> int:
        """Bytes that left the device.

        A tensor on its way to disk through host memory is in both counters, so this takes the larger one, never the
        sum. A tensor that the program itself held until backward was copied, but has not left.
        """
        copied_bytes = max(self.host_written_bytes, self.nvme_written_bytes)
        return max(0, copied_bytes - self.kept_bytes.get(KeepReason.ALIVE.value, 0))

    @property
    def moved_share(self) -> float:
        """``moved_bytes`` as a share of ``activation_bytes``, 0 to 1 (alignment could push the quotient above 1)."""
        return min(1.0, self.moved_bytes / self.activation_bytes) if self.activation_bytes > 0 else 0.0

    @property
    def resident_share(self) -> float:
        """``resident_peak_bytes`` as a share of ``baseline_peak_bytes``; 0 if nothing was saved."""
        return self.resident_peak_bytes / self.baseline_peak_bytes if self.baseline_peak_bytes > 0 else 0.0

    @property
    def wait_s(self) -> float:
        """Time that steps waited for this library, forward and backward together."""
        return self.pack_wait_s + self.unpack_wait_s

    def metrics(self, since: Statistics | None = None) -> dict[str, float]:
        """Return numbers for a logger of metrics, such as W&B's or TensorBoard's, with names under ``actoffload/``.

        Args:
            since: the statistics at the last call. Counts are the difference to them, peaks are of all time.
        """
        before = since or Statistics()
        done = ("moved_bytes", "wait_s", "host_written_bytes", "nvme_written_bytes")
        found = {name: getattr(self, name) - getattr(before, name) for name in done}
        found |= {name: getattr(self, name) for name in ("resident_peak_bytes", "baseline_peak_bytes")}
        return {f"actoffload/{name}": value for name, value in found.items()}

    def as_dict(self) -> dict[str, object]:
        """Return every field and derived number, ready for JSON."""
        derived = ("saved_bytes", "activation_bytes", "moved_bytes", "moved_share", "resident_share", "wait_s")
        return asdict(self) | {name: getattr(self, name) for name in derived}
