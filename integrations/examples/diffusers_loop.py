"""A UNet of diffusers with random weights learns to take noise out of pictures: one call of `attach` on the model.

    python -m actoffload.integrations.examples.diffusers_loop --target nvme --path /mnt/nvme0
    python -m actoffload.integrations.examples.diffusers_loop --target none

Both print the same losses, bit for bit. A comment marks the line that switches offloading on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn import functional as F

import actoffload

from .common import make_parser, options, waves


def main(arguments: Sequence[str] | None = None) -> None:
    """Train."""
    args = make_parser(__doc__, steps=10, batch=8, width=64, size=32).parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=args.size,
        block_out_channels=(args.width, 2 * args.width),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    noising = DDPMScheduler()

    if args.target != "none":
        actoffload.attach(model, **options(args))  # <- offloading

    for step in range(args.steps):
        pictures, _ = waves(step, args.batch, args.size, device)
        noise = torch.randn_like(pictures)
        times = torch.randint(noising.config.num_train_timesteps, (args.batch,), device=device)
        loss = F.mse_loss(model(noising.add_noise(pictures, noise, times), times).sample, noise)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f} = {float(loss).hex()}", flush=True)

    attachment = actoffload.Attachment.of(model)
    if attachment is not None:
        print(attachment.offloader.report())  # bytes moved, and the reasons


if __name__ == "__main__":
    main()
