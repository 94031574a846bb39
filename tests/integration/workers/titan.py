"""torchtitan's llama3 debug model on the CPU: each row runs a user's command line.

Stand-ins replace the parts of torchtitan 0.3.0 that need a GPU: Triton, memory statistics, compiled FlexAttention.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import runpy
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch._utils
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention

from actoffload import Attachment
from tests.integration.processes import main, scratch
from tests.integration.workers.upstream import python_of

torch._utils._get_available_device_type = lambda: "cpu"
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()  # needs Triton

from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

FLAGS = (
    "--module llama3 --config llama3_debugmodel --training.steps 2 --training.seq_len 64 --training.local_batch_size 2 "
    "--training.global_batch_size 4 --training.mixed_precision_param float32 --training.disable_cuda_graphs "
    "--debug.seed 1 --validator.enable --validator.freq 1 --validator.steps 1 --validator.dataloader.dataset c4_test"
)
OFFLOAD = "activation-checkpoint:actoffload --activation-checkpoint.target nvme"
ROWS = {
    "none": ("activation-checkpoint:none", "0"),
    "none, flag": (OFFLOAD, "auto"),
    "none, variable": ("activation-checkpoint:none", "nvme"),
    "full, override": (
        '--override.imports upstream_shim.offload={"target":"nvme","device_budget":"40%"} activation-checkpoint:full',
        "0",
    ),
    "full, flag": (f"{OFFLOAD} --activation-checkpoint.checkpointing full", "0"),
    "selective, variable": ("activation-checkpoint:selective", "nvme"),
}
"""Command lines by name, and the value of ``ACTOFFLOAD``."""
REFUSED = {
    "CUDA graphs": f"--training.no-disable-cuda-graphs {OFFLOAD}",
    "its own offloading": f"--compile.memory_policy sac_and_offload {OFFLOAD}",
    "one graph": OFFLOAD,
    "wrong target": "activation-checkpoint:actoffload --activation-checkpoint.target disk",
    "wrong size": f"{OFFLOAD} --activation-checkpoint.device-budget much",
    "unknown variable": "activation-checkpoint:none",
}


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any
) -> Any:
    """Plain attention in place of FlexAttention, which has no backward on the CPU."""
    rows, columns = torch.arange(query.shape[-2])[:, None], torch.arange(key.shape[-2])[None]
    masks = [block_mask.mask_mod(torch.tensor(each), torch.tensor(0), rows, columns) for each in range(len(query))]
    mask = torch.stack(masks)[:, None]
    return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa), None


def with_few_layers(make: Any) -> Any:
    """The debug model with two of its six layers, as the time of a row is theirs."""

    def made(**options: Any) -> Any:
        config = make(**options)
        config.layers = config.layers[:2]
        return config

    return made


def stand_in() -> None:
    """Replace the parts that need a GPU, and make the model smaller."""
    llama3.llama3_configs["debugmodel"] = with_few_layers(llama3.llama3_configs["debugmodel"])
    attention.FlexAttention._compiled_flex_attn = staticmethod(attend)
    attention._compiled_create_block_mask = attention.create_block_mask
    monitor = SimpleNamespace(
        device_name="A100", get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6), reset_peak_stats=lambda: None
    )
    metrics.build_device_memory_monitor = lambda: monitor
    utils.set_pg_timeouts = lambda **_: None


def write_assets() -> None:
    """Write a tokenizer of bytes and a text to the debug model's paths."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    os.chdir(scratch())
    os.makedirs("tests/assets/tokenizer")
    os.makedirs("tests/assets/c4_test")
    (scratch() / "upstream_shim.py").write_text(python_of("torchtitan"))
    sys.path.append(str(scratch()))
    tokenizer.save("tests/assets/tokenizer/tokenizer.json")
    with open("tests/assets/tokenizer/tokenizer_config.json", "w") as file:
        json.dump({"eos_token": "</s>"}, file)
    with open(torch.__file__) as source, open("tests/assets/c4_test/data.json", "w") as file:
        text = source.read()
        file.writelines(json.dumps({"text": text[start : start + 400]}) + "\n" for start in range(0, 40_000, 400))


def command(arguments: str) -> None:
    """Run ``python -m actoffload.integrations.torchtitan`` with these arguments; the process group stays."""
    with patch.object(sys, "argv", ["train", *arguments.split()]), patch.object(dist, "destroy_process_group"):
        runpy.run_module("actoffload.integrations.torchtitan", run_name="__main__")


def train(arguments: str, variable: str) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": []}
    close = Trainer.close

    def log(self: Any, step: int, average: float, largest: float, norm: float, **_: Any) -> None:
        found["losses"].append((step, average.hex(), largest.hex(), norm.hex()))

    def validated(self: Any, loss: float, step: int, **_: Any) -> None:
        found["losses"].append((step, loss.hex()))

    def look(self: Any) -> None:
        digest = hashlib.sha256()
        for name, value in sorted(self.model_parts[0].state_dict().items()):
            local = value.to_local() if isinstance(value, DTensor) else value
            digest.update(name.encode() + local.numpy().tobytes())
        found["weights"] = digest.hexdigest()
        attachment = Attachment.of(self.model_parts[0])
        close(self)
        found["statistics"] = None
        if attachment is not None:
            found["statistics"] = attachment.offloader.statistics()
            found["debug"] = attachment.offloader.config.debug
            attachment.offloader.close()

    os.environ["ACTOFFLOAD"] = variable
    with (
        patch.object(metrics.MetricsProcessor, "log", log),
        patch.object(metrics.MetricsProcessor, "log_validation", validated),
        patch.object(Trainer, "close", look),
        patch.object(time, "sleep"),
    ):
        command(f"{FLAGS} {arguments}")
    return found


def refuse(name: str, arguments: str) -> str:
    flags = FLAGS
    if name in ("its own offloading", "one graph"):
        flags = FLAGS.replace("--module llama3 --config ", "--module graph_trainer.llama3 --config graph_trainer_")
    if name == "unknown variable":
        os.environ.update(ACTOFFLOAD="nvme", ACTOFFLOAD_BUDGET="1GiB")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            command(f"{flags} {arguments}")
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error} {printed.getvalue()}"
    return "nothing"


def work() -> dict[str, Any]:
    stand_in()
    write_assets()
    rows = {name: train(*row) for name, row in ROWS.items()}
    return {"rows": rows, "refused": {name: refuse(name, row) for name, row in REFUSED.items()}}


if __name__ == "__main__":
    main(work)
