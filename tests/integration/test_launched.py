"""FSDP2 and DeepSpeed through transformers' Trainer and Accelerate: two ranks that ``accelerate launch`` starts."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.evidence import Run, assert_evidence
from tests.integration.processes import GIVE_UP_S, PYTHONPATH, ROOT, Chosen
from tests.programs import warm_python

for _package in ("accelerate", "deepspeed", "safetensors", "transformers"):
    pytest.importorskip(_package)

from accelerate.commands.config.config_args import ClusterConfig  # noqa: E402

FRAMEWORKS = {"Trained": "Transformers", "Looped": "Accelerate"}
SETUPS = ("FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")
ROWS = [*itertools.product(FRAMEWORKS, SETUPS, (False, True), ("env",)), ("Trained", "ZeRO-3", True, "code")]
CASES = [
    pytest.param(
        *row,
        marks=[
            pytest.mark.proves(f"{FRAMEWORKS[row[0]]}, {row[1]}", checkpointing=row[2], way=row[3]),
            *([pytest.mark.thorough] if row[1] == "ZeRO-1" else []),  # the library asks only whether the stage is 3
        ],
    )
    for row in ROWS
]
START = """
import sys
sys.modules["datasets"] = sys.modules["peft"] = None
from tests.integration.workers.{0} import main
main()
"""
"""Transformers would import these two, which takes seconds, and no program here uses them."""


@pytest.fixture(scope="module")
def ranks(chosen: Chosen, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Run]]:
    """The results of each program in two ranks that ``accelerate launch`` starts, once for each configuration file."""
    folder = tmp_path_factory.mktemp("launched")
    setups = [setup for setup in SETUPS if setup in chosen("setup")]
    files = [write(folder, setup, checkpointed=False) for setup in setups]
    files += [write(folder, "FSDP2", checkpointed=True)] if "FSDP2" in setups else []
    usual = {"RANKS_DIRECTORY": folder, "TMPDIR": folder, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": 1}
    ours = {"": "nvme", "_PATH": folder, "_MIN_BYTES": "1KiB", "_POLICY": "greedy", "_DEVICE_BUDGET": "48KiB"}
    variables = usual | {f"ACTOFFLOAD{name}": value for name, value in ours.items()}
    with open(folder / "log.txt", "w+", encoding="utf-8") as log:

        def start(name: str, *arguments: Path) -> subprocess.Popen[bytes]:
            command = [warm_python(), "-c", START.format(name), *map(str, arguments)]
            env = os.environ | {name: str(value) for name, value in variables.items()}
            return subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

        # Both take seconds to import, so they start side by side.
        processes = [start("launched"), start("launch_each", *files)]
        deadline_s = time.monotonic() + GIVE_UP_S
        try:
            while all(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
                time.sleep(0.1)
        finally:
            for process in processes:  # its children are in the same process group
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        assert processes[1].returncode == 0, log.read()[-16000:]
    parts = [[torch.load(file, weights_only=False) for file in folder.glob(f"*-rank{rank}.pt")] for rank in (0, 1)]
    return [dict(item for part in of_rank for item in part.items()) for of_rank in parts]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "setup", "checkpointed", "way"), CASES)
def test_losses_and_saved_weights_are_those_of_the_program_alone(
    ranks: list[dict[Any, Run]], program: str, setup: str, checkpointed: bool, way: str
) -> None:
    """Each program resumes from its own checkpoint half-way. The files of ``save_model`` are compared, too."""
    for rank in ranks:
        plain = rank[program, setup, False, "none"]
        assert plain.statistics is None
        assert len(plain.losses) >= 3
        assert any(name.startswith("saved ") for name in plain.tensors)
        assert_evidence(rank[program, setup, checkpointed, way], plain)
    first, second = (rank[program, setup, False, "none"].losses[0] for rank in ranks)
    assert program == "Trained" or not torch.equal(first, second), "each rank has its own examples"


def write(folder: Path, setup: str, *, checkpointed: bool) -> Path:
    """A file as ``accelerate config`` writes it. With DeepSpeed the program switches checkpoints on, not the file."""
    sections: dict[str, Any] = {}
    if setup == "FSDP2":
        blocks = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
        memory = {"reshard_after_forward": True, "offload_params": False, "cpu_ram_efficient_loading": False}
        chosen = {"version": 2, "state_dict_type": "FULL_STATE_DICT", "activation_checkpointing": checkpointed}
        sections["fsdp_config"] = {f"fsdp_{name}": value for name, value in (blocks | memory | chosen).items()}
    else:
        stage = int(setup[-1])
        zero = {"zero_stage": stage, "zero3_init_flag": False, "zero3_save_16bit_model": stage == 3}
        near = {"offload_optimizer_device": "none", "offload_param_device": "none"}
        sections["deepspeed_config"] = {"gradient_accumulation_steps": 1, **zero, **near}
    machine: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, "main_process_port": 0}
    machine |= {"mixed_precision": "no", "use_cpu": False, "debug": False}
    kind: Any = "FSDP" if setup == "FSDP2" else "DEEPSPEED"
    config: Any = ClusterConfig(distributed_type=kind, **machine, **sections)
    file = folder / (f"{setup}-{checkpointed}.yaml" if setup == "FSDP2" else f"{setup}.yaml")
    config.to_yaml_file(file)
    return file
