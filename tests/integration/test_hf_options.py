"""Options that the adapter for Hugging Face refuses or takes over, and its dataclass of flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from actoffload.integrations.hf import OffloadArguments, attach
from torch import nn
from transformers import HfArgumentParser, Trainer

from actoffload import OffloadConfig
from actoffload.errors import ConfigError
from tests.integration.hf_models import attached, checkpointing, make_trainer

for _package in ("accelerate", "peft"):
    pytest.importorskip(_package)


# -- refused or taken over --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), None, Trainer], ids=["module", "none", "class"])
def test_only_a_trainer_is_accepted(thing: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer=.*: give a transformers.Trainer"):
        attach(thing)


def test_attaching_twice_is_refused(tmp_path: Path) -> None:
    options = {"target": "nvme", "path": tmp_path}
    with attached(trainer := make_trainer(tmp_path), **options), pytest.raises(ConfigError, match="attached already"):
        attach(trainer, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "floppy"}, "target='floppy': choose one of"),
        ({"min_byte": 3}, "min_byte=3: no such option; did you mean min_bytes?"),
        ({"device_budget": "much"}, "device_budget='much': not a size"),
    ],
)
def test_an_option_that_cannot_work_leaves_the_trainer_alone(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    before = dict(vars(trainer))
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        attach(trainer, **options)
    assert dict(vars(trainer)) == before


def test_the_flag_of_transformers_is_taken_over(tmp_path: Path) -> None:
    options: dict[str, Any] = checkpointing(reentrant=False)
    options["activation_checkpointing_kwargs"] = {"use_reentrant": False, "offload": "nvme"}
    trainer = make_trainer(tmp_path, **options)
    attachment = attach(trainer, path=tmp_path)
    assert attachment.offloader.config.target == "nvme"
    assert trainer.args.activation_checkpointing_kwargs == {"use_reentrant": False}
    trainer.train()
    attachment.detach()
    assert trainer.args.activation_checkpointing_kwargs == {"use_reentrant": False, "offload": "nvme"}
    with attached(trainer, path=tmp_path):
        trainer.args.activation_checkpointing_kwargs = {"offload": True}  # set after attach(), and enabled by train()
        with pytest.raises(ConfigError, match="activation_checkpointing_enable"):
            trainer.train()


@pytest.mark.parametrize("value", ["floppy", 3])
@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing", "activation_offloading"])
def test_a_flag_with_a_value_that_cannot_work_is_refused(name: str, value: object, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    flag = name
    if name == "activation_offloading":  # a field of TRL's arguments
        trainer.args.activation_offloading = value
    else:
        setattr(trainer.args, name, True)
        setattr(trainer.args, f"{name}_kwargs", {"offload": value})
        flag = rf"{name}_kwargs\['offload'\]"
    with pytest.raises(ConfigError, match=f"{flag}=.*choose one of .*, or True"):
        attach(trainer)


def test_the_offloading_of_transformers_by_hand_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.model.activation_checkpointing_enable(offload=True)
    with pytest.raises(ConfigError, match=r"activation_checkpointing_enable\(offload=...\)"):
        attach(trainer)
    trainer.model.activation_checkpointing_enable()
    with attached(trainer, target="nvme", path=tmp_path):
        pass


def test_the_flag_of_accelerate_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=True, activation_checkpointing_offload=True
    )
    trainer = make_trainer(tmp_path)
    monkeypatch.setitem(trainer.accelerator.state.__dict__, "fsdp_plugin", plugin)
    with attached(trainer, target="nvme", path=tmp_path):
        assert not plugin.activation_checkpointing_offload
    assert plugin.activation_checkpointing_offload


def test_data_parallel_threads_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(ConfigError, match=r"n_gpu=2: nn\.DataParallel"):
        attach(trainer)


# -- the dataclass of flags -------------------------------------------------------------------------------------------


def parse(*flags: str) -> Any:
    parser = HfArgumentParser(OffloadArguments)
    (found,) = parser.parse_args_into_dataclasses(list(flags))
    return found


def test_flags_are_off_by_default(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert parse("--actoffload_path", str(tmp_path)).attach(trainer) is None
    assert not hasattr(trainer, "actoffload")


def test_flags_are_options(tmp_path: Path) -> None:
    flags = parse(
        *("--actoffload_target", "nvme", "--actoffload_path", str(tmp_path), "--actoffload_min_bytes", "1KiB"),
        *("--actoffload_device_budget", "131072", "--actoffload_exclude", "lm_head", "model.norm"),
        *("--actoffload_exclude", "model.embed_tokens"),  # a repeated flag adds values
        *("--actoffload_verify", "--actoffload_announce", "first", "--actoffload_checkpoints", "leave"),
        *("--actoffload_recompute", "1"),
    )
    attachment = flags.attach(make_trainer(tmp_path), policy="all")
    excluded = ("lm_head", "model.norm", "model.embed_tokens")
    config = attachment.offloader.config
    assert (config.device_budget, config.min_bytes, config.policy) == (131072, 1024, "all")
    assert (config.exclude, config.verify, config.announce) == (excluded, True, "first")
    assert (config.checkpoints, config.recompute) == ("leave", True)
    attachment.detach()
    attachment.offloader.close()


def test_a_flag_with_an_unknown_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("target", "engine"):
        with pytest.raises(SystemExit):
            parse(f"--actoffload_{flag}", "floppy")
        assert "invalid choice: 'floppy'" in capsys.readouterr().err


def test_a_flag_that_cannot_work_is_named() -> None:
    values = {"device_budget": "much", "host_budget": "-1", "nvme_budget": "0", "min_bytes": "many", "io_threads": "-1"}
    for name, value in values.items():
        with pytest.raises(ConfigError, match=f"actoffload_{name}='?{value}"):
            parse("--actoffload_target", "nvme", f"--actoffload_{name}={value}")
    parser = HfArgumentParser(OffloadArguments)
    with pytest.raises(ConfigError, match="actoffload_target='floppy': choose one of"):
        parser.parse_dict({"actoffload_target": "floppy"})
    with pytest.raises(ValueError, match="actoffload_targets"):
        parser.parse_dict({"actoffload_targets": "nvme"})


def test_a_path_with_a_colon_is_one_directory(tmp_path: Path) -> None:
    """Only in the environment variable does a colon separate directories."""
    path = str(tmp_path / "a:b")
    assert OffloadArguments(actoffload_target="nvme", actoffload_path=path).options()["path"] == path
    options = OffloadConfig.options_from_environment({"ACTOFFLOAD": "nvme", "ACTOFFLOAD_PATH": path})
    assert options["path"] == path.split(":")
