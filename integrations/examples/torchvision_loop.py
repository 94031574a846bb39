"""A ResNet of torchvision with random weights learns the direction of waves: one call of `attach` on the model.

    python -m actoffload.integrations.examples.torchvision_loop --target nvme --path /mnt/nvme0
    python -m actoffload.integrations.examples.torchvision_loop --target none

Both print the same losses, bit for bit. A comment marks the line that switches offloading on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F
from torchvision.models import resnet18

import actoffload

from .common import KINDS, make_parser, options, waves


def main(arguments: Sequence[str] | None = None) -> None:
    """Train."""
    args = make_parser(__doc__, steps=10, batch=16, size=64).parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    model = resnet18(num_classes=KINDS).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    if args.target != "none":
        actoffload.attach(model, **options(args))  # <- offloading

    for step in range(args.steps):
        pictures, kinds = waves(step, args.batch, args.size, device)
        loss = F.cross_entropy(model(pictures), kinds)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f} = {float(loss).hex()}", flush=True)

    attachment = actoffload.Attachment.of(model)
    if attachment is not None:
        print(attachment.offloader.report())  # bytes moved, and the reasons


if __name__ == "__main__":
    main()
