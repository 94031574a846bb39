"""``fp8``: how far gradients are from the exact ones, the bytes that move, and the loss of a GPT that trains with it.

    python -m benchmarks.fp8 [--steps N] [--tiny] [--path DIR]

Gradients are those of one step of GPT-2, BERT and Llama with random weights. GPT-2 then trains on the text of Python's
language reference (`pydoc_data.topics`), byte by byte, from the same weights and on the same batches each time.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import actoffload
from benchmarks import harness
from benchmarks.harness import Bound, Row, mib
from benchmarks.workloads import build

PATTERNS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {"feed-forward": ("*.mlp",), "layers": ("transformer.h.*",), "all": ("*",)},
    "bert": {
        "feed-forward": ("*.intermediate", "*.layer.[0-9].output"),
        "layers": ("bert.encoder.layer.*",),
        "all": ("*",),
    },
    "llama": {"feed-forward": ("*.mlp",), "layers": ("model.layers.*",), "all": ("*",)},
}
EXACT, FEED_FORWARD = "exact", "feed-forward"
LANGUAGE = {"hidden": 256, "layers": 6, "seq": 256, "vocab": 2048}
LLAMA = LANGUAGE | {"inner": 704, "heads": 4, "kv_heads": 2}
TEXT = {"hidden": 128, "layers": 4, "seq": 128, "vocab": 256}
COSINE, LOSS = 0.999, 1.01
"""Of the gradients with the exact ones; the mean loss of the last steps, times that of exact training."""
LAST = 20
Forward = Callable[[], Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result files; 1 when a bound does not hold."""
    parser = harness.make_parser(__doc__, tiny=True)
    parser.add_argument("--steps", type=int, default=200, help="of the training")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # no time is measured, and the machine may be busy
    configuration = {"sizes": LANGUAGE, "llama": LLAMA, "text": TEXT, "patterns": PATTERNS}
    results = harness.Results("fp8", arguments, configuration | {"steps": options.steps}, keep=not options.tiny)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        rows: dict[str, Row] = {}
        for model in PATTERNS:
            for dtype in ("float32", "bfloat16"):
                rows |= compare_random(model, dtype, folder, options)
                results.write(rows=rows)
        losses = {}
        for name in (EXACT, FEED_FORWARD, "all"):
            losses[name], trained, forward = train(PATTERNS["gpt2"].get(name), folder, options)
            if name == EXACT:
                rows |= compare("gpt2 after its training", trained, forward, PATTERNS["gpt2"], folder, options)
            results.write(rows=rows, losses=losses)
    bounds = [
        Bound(what=f"{name}: cosine", measured=row["cosine"], bound=COSINE, at_most=False)
        for name, row in rows.items()
        if name.endswith(f", {FEED_FORWARD}")
    ]
    last = {name: sum(found[-LAST:]) for name, found in losses.items()}
    what = f"loss of the last {LAST} steps × exact"
    bounds.append(Bound(what=what, measured=last[FEED_FORWARD] / last[EXACT], bound=LOSS, unit=" ×"))
    columns: dict[str, Callable[[Row], object]] = {
        "cosine": harness.number("cosine", 1, 5),
        "error": harness.number("error", 1, 4),
        "moved": lambda row: mib(row["moved_bytes"]),
        "× exact": lambda row: f"{row['moved_bytes'] / row['exact_moved_bytes']:.2f}",
    }
    table = harness.table_of("gradients of one step", rows, columns)
    after = [step for step in (25, 50, 100, 200) if step <= options.steps]
    table += "\n" + harness.markdown_table(
        ("loss after", *map(str, after)),
        [(name, *(f"{one[step - 1]:.4f}" for step in after)) for name, one in losses.items()],
    )
    return 0 if results.finish(table, bounds) else 1


def options_for(patterns: Sequence[str] | None, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {"path": folder, "policy": "all", "fp8": patterns, "announce": "none"}
    return given | ({"min_bytes": 0} if options.tiny else {})


def compare_random(name: str, dtype: str, folder: str, options: argparse.Namespace) -> dict[str, Row]:
    """Return the rows of a model with random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = LLAMA if name == "llama" else LANGUAGE
    spec = {"model": name, "dtype": dtype, "batch": 2, "sizes": sizes}
    if options.tiny:
        spec |= {"batch": 1, "sizes": sizes | {"layers": 2, "seq": 32}}
    work = build(spec)
    return compare(f"{name}, {dtype}", work.model, lambda: work.forward()[0], PATTERNS[name], folder, options)


def compare(
    title: str,
    model: nn.Module,
    forward: Forward,
    kinds: Mapping[str, Sequence[str]],
    folder: str,
    options: argparse.Namespace,
) -> dict[str, Row]:
    """Return a row for each kind of patterns: the gradients of one step beside the exact ones."""
    exact, exact_moved_bytes = gradients(model, forward, options_for(None, folder, options))
    rows = {}
    for kind, patterns in kinds.items():
        found, moved_bytes = gradients(model, forward, options_for(patterns, folder, options))
        rows[f"{title}, {kind}"] = {
            "cosine": float(torch.nn.functional.cosine_similarity(found, exact, dim=0)),
            "error": float((found - exact).norm() / exact.norm()),
            "moved_bytes": moved_bytes,
            "exact_moved_bytes": exact_moved_bytes,
        }
    return rows


def gradients(model: nn.Module, forward: Forward, options: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Return all gradients of one step as one vector, and the bytes that moved."""
    model.zero_grad()
    torch.manual_seed(1)  # of dropout
    with actoffload.offload_activations("nvme", model=model, **options) as offloader:
        loss = forward()
    offloader.synchronize()
    torch.autograd.backward(loss)
    moved_bytes = offloader.statistics().moved_bytes
    offloader.close()
    found = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat(found).double(), moved_bytes


def train(
    patterns: Sequence[str] | None, folder: str, options: argparse.Namespace
) -> tuple[list[float], nn.Module, Forward]:
    """Train a GPT-2 on text; return the losses in nats a byte, the model, and a forward of one more batch."""
    torch.manual_seed(0)
    sizes = TEXT | ({"hidden": 64, "layers": 2, "seq": 32} if options.tiny else {})
    model: Any = build({"model": "gpt2", "dtype": "float32", "batch": 1, "sizes": sizes}).model
    text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = options_for(patterns, folder, options)
    starts = torch.randint(0, len(tokens) - sizes["seq"], (options.steps + 1, 4))

    def forward(step: int = options.steps) -> Tensor:
        batch = torch.stack([tokens[start : start + sizes["seq"]] for start in starts[step]]).long()
        loss: Tensor = model(input_ids=batch, labels=batch).loss
        return loss

    losses = []
    for step in range(options.steps):
        optimizer.zero_grad()
        with actoffload.offload_activations("nvme", model=model, **given) as offloader:
            loss = forward(step)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    offloader.close()
    return losses, model, forward


if __name__ == "__main__":
    raise SystemExit(main())
