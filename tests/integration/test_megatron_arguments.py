"""The Megatron adapter's command line, beside Megatron's own arguments and switches."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core.package_info")

from actoffload.integrations.megatron import add_actoffload_args, arguments, microbatches, wrap_forward_step

from actoffload import OffloadConfig, Plan
from actoffload.errors import ConfigError

pytestmark = [
    # At import, Megatron warns of missing packages.
    pytest.mark.filterwarnings("ignore:(Transformer Engine and )?Apex.*not installed:UserWarning"),
    pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning"),
]


def no_step(data_iterator: Any, model: Any) -> Any:
    raise AssertionError


def parse(text: str) -> argparse.Namespace:
    found: argparse.Namespace = add_actoffload_args(argparse.ArgumentParser()).parse_args(text.split())
    return found


Wrap = Callable[..., Any]


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Wrap]:
    """Wrap `no_step` for target nvme, with more flags, and switches of Megatron's; the offloaders end with the test."""
    made: list[Any] = []

    def wrapped(flags: str = "", **switches: Any) -> Any:
        args = parse(f"--actoffload-target nvme --actoffload-path {tmp_path} {flags}")
        vars(args).update(switches)
        made.append(wrap_forward_step(no_step, args))
        assert made[-1].offloader is not None
        return made[-1]

    yield wrapped
    for step in made:
        step.offloader.close()


def options_of(flags: str) -> dict[str, Any]:
    """The options of a command line for target nvme."""
    found: dict[str, Any] | None = arguments.options_of(parse(f"--actoffload-target nvme {flags}"))
    assert found is not None
    return found


# -- the lines of docs/frameworks/megatron.md -----------------------------------------------------------------------


def documented_lines() -> list[str]:
    """The two ways to call ``pretrain`` in docs/frameworks/megatron.md, as source text."""
    text = (Path(__file__).parents[2] / "docs/frameworks/megatron.md").read_text(encoding="utf-8")
    block = text.split("```python\n")[1].split("```")[0]
    _, released, newest, _ = block.split("\n# ")
    return [part.partition("\n")[2] for part in (released, newest)]


def standing_for(signature: inspect.Signature, returned: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A function with a signature of Megatron's; its result is that of ``returned`` for the arguments by name."""
    return lambda *args, **kwargs: returned(signature.bind(*args, **kwargs).arguments)


def parsed(passed: dict[str, Any]) -> argparse.Namespace:
    """The command line as a function of Megatron's parses it that was handed a provider of more flags."""
    found: argparse.Namespace = passed["extra_args_provider"](argparse.ArgumentParser()).parse_args()
    return found


SIGNATURES = {
    "released pretrain": "train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, "
    "process_non_loss_data_func=None, extra_args_provider=None, args_defaults={}",
    "newest pretrain": "cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, "
    "model_provider=None, process_non_loss_data_func=None",
    "parse_and_validate_args": "extra_args_provider=None, ignore_unknown_args=False, args_defaults={}",
    "gpt_config_from_args": "args, config=None, model_config_cls=object",
    "pretrain_cfg_container_from_args": "args, model_cfg=None",
}
"""Those of Megatron-LM at its commits 001b00c2734d (released) and d98e8a64ddf3 (22 August 2026; core 0.20.0)."""


def test_the_documented_lines_fit_megatrons_signatures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Any, Any]] = []
    returned: dict[str, Callable[[dict[str, Any]], Any]] = {
        "parse_and_validate_args": parsed,
        "gpt_config_from_args": lambda passed: passed["args"],
        "pretrain_cfg_container_from_args": lambda passed: passed["model_cfg"],
        "released pretrain": lambda passed: seen.append((parsed(passed), passed["forward_step_func"])),
        "newest pretrain": lambda passed: seen.append((passed["cfg_container"], passed["forward_step_func"])),
    }
    theirs = {
        name: standing_for(inspect.signature(eval(f"lambda {parameters}: None")), returned[name])
        for name, parameters in SIGNATURES.items()
    }
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--actoffload-target", "nvme", "--actoffload-path", str(tmp_path)])
    names: dict[str, Any] = {name: None for name in ("datasets", "model_provider", "model_type")} | theirs
    names |= {"forward_step": no_step, "wrap_forward_step": wrap_forward_step}
    for line, version in zip(documented_lines(), ("released", "newest"), strict=True):
        exec(line, {**names, "add_actoffload_args": add_actoffload_args, "pretrain": theirs[f"{version} pretrain"]})
    assert [args.actoffload_path for args, _ in seen] == [[str(tmp_path)]] * 2
    assert all(callable(step) and step.offloader is None for _, step in seen)


# -- the command line -------------------------------------------------------------------------------------------------


def test_every_flag_reaches_the_offloader(wrap: Wrap, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    (tmp_path / "plan.json").write_text(Plan(()).to_json(), encoding="utf-8")
    config = wrap(
        f"--actoffload-target tiered --actoffload-path {tmp_path}/second --actoffload-io-threads 3 "
        "--actoffload-device-budget 3MiB --actoffload-host-budget 64MiB --actoffload-nvme-budget 1GiB "
        "--actoffload-min-bytes 5 --actoffload-modules a.* b.c --actoffload-exclude-modules c "
        f"--actoffload-policy {tmp_path}/plan.json --actoffload-engine posix "
        f"--actoffload-verify --actoffload-trace {tmp_path}/trace.json --actoffload-announce all "
        "--actoffload-checkpoints leave --actoffload-recompute d.*,e"
    ).offloader.config
    assert config == OffloadConfig(
        target="tiered",
        path=(tmp_path, tmp_path / "second"),
        device_budget=3 << 20,
        host_budget=64 << 20,
        nvme_budget=1 << 30,
        min_bytes=5,
        include=("a.*", "b.c"),
        exclude="c",
        policy=config.policy,
        engine="posix",
        io_threads=3,
        verify=True,
        trace=str(tmp_path / "trace.json"),
        announce="all",
        checkpoints="leave",
        recompute=("d.*", "e"),
    )
    assert not isinstance(config.policy, str)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--actoffload-target", "ssd"),
        ("--actoffload-device-budget", "much"),
        ("--actoffload-nvme-budget", "0"),
        ("--actoffload-policy", "none"),
        ("--actoffload-engine", "tape"),
        ("--actoffload-announce", "loudly"),
        ("--actoffload-io-threads", "much"),
    ],
)
def test_a_bad_value_names_its_flag(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(f"{flag}={value}")
    assert stopped.value.code == 2
    assert f"argument {flag}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"actoffload_target": "nvme", "actoffload_min_bytes": "1XB"}, "--actoffload-min-bytes='1XB'"),
        ({"actoffload_target": "ssd"}, "--actoffload-target='ssd'"),
        ({"actoffload_target": "nvme", "actoffload_path": ["/missing"]}, "--actoffload-path="),
        ({"hidden_size": 4}, "add_actoffload_args"),
        (
            {"actoffload_target": "nvme", "actoffload_modules": ["core_att"]},
            "no such name; choose from layer_input, .*",
        ),
        ({"actoffload_target": "nvme", "actoffload_modules": ["attn_proj"]}, "name core_attn as well"),
    ],
)
def test_a_bad_value_that_no_parser_saw_names_its_flag(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        wrap_forward_step(no_step, argparse.Namespace(**values))


def test_names_of_modules_are_globs_in_the_end() -> None:
    options = options_of("--actoffload-modules mlp_act a.* expert_fc1 moe_act")
    assert options["include"] == ["a.*", "*.mlp", "*.experts*.linear_fc1", "*.experts"]
    assert options["exclude"] == ["*.mlp.linear_fc1", "*.mlp.linear_fc2", "*.experts*.linear_fc2"]


def test_all_names_of_megatrons_offload_modules_are_taken() -> None:
    """The names are from Megatron-LM at d98e8a64ddf3, in megatron/core/transformer/transformer_config.py."""
    theirs = "core_attn attn_proj expert_fc1 fused_group_mlp moe_act attn_norm mlp_norm qkv_linear gdp_qkv"
    assert arguments.MODULES.keys() == {*theirs.split(), "layer_input", "mlp_act"}
    options = options_of("--actoffload-modules gdp_qkv fused_group_mlp")
    assert options["include"] == ["*.mixer", "*.experts"]
    assert options["exclude"] == ["*.mixer.in_proj", "*.mixer.norm", "*.mixer.out_proj"]


def test_a_switch_that_is_none_is_off(wrap: Wrap) -> None:
    wrap(cuda_graph_impl="none")


def test_names_of_modules_that_the_model_has_not_are_refused(wrap: Wrap) -> None:
    for name, chunk, message in (
        ("mlp_act", chunk_with(num_moe_experts=2), "--actoffload-modules='mlp_act': the model has experts"),
        ("core_attn", chunk_with(), r"--actoffload-modules=.*'\*.core_attention' matches no module of the model"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrap(f"--actoffload-modules {name}")(None, chunk)


def test_a_plan_that_is_none_names_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"version": 7}), encoding="utf-8")
    with pytest.raises(SystemExit):
        parse(f"--actoffload-policy {tmp_path}/plan.json")
    assert "argument --actoffload-policy: " in capsys.readouterr().err


def test_each_rank_traces_into_its_own_file(wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    wrap(f"--actoffload-trace {tmp_path}/t.json").offloader.close()
    assert [file.name for file in tmp_path.glob("*.json")] == ["t.rank1.json"]


def test_a_flag_that_takes_several_values_may_be_given_again(tmp_path: Path) -> None:
    paths = f"--actoffload-path {tmp_path}/a --actoffload-path {tmp_path}/b {tmp_path}/c"
    modules = "--actoffload-modules core_attn --actoffload-modules decoder.layers.0.*"
    options = options_of(f"{paths} {modules}")
    assert options["path"] == [f"{tmp_path}/{name}" for name in "abc"]
    assert sorted(options["include"]) == ["*.core_attention", "decoder.layers.0.*"]


# -- beside Megatron --------------------------------------------------------------------------------------------------


def test_megatrons_own_arguments_are_used_at_the_first_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args: list[argparse.Namespace] = []
    training = types.ModuleType("megatron.training")
    monkeypatch.setattr(training, "get_args", lambda: args[0], raising=False)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    step = wrap_forward_step(lambda data, model: (model(torch.ones(2)).exp(), None))  # Megatron has parsed nothing yet
    assert step.offloader is None
    args.append(parse(f"--actoffload-target nvme --actoffload-min-bytes 0 --actoffload-path {tmp_path}"))
    step(None, chunk_with())
    assert step.offloader is not None
    assert step.offloader.statistics().packed_tensors > 0
    step.offloader.close()


def test_without_megatron_training_the_arguments_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"megatron\.training is not installed"):
        wrap_forward_step(no_step)(None, None)


def chunk_with(**more: Any) -> torch.nn.Module:
    settings: dict[str, Any] = {
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_vp_stage": None,
    }
    chunk: Any = torch.nn.Linear(2, 2)
    chunk.config = types.SimpleNamespace(**settings | more)
    return chunk  # type: ignore[no-any-return]


SWITCHES = [
    ("cpu_offloading", "--cpu-offloading"),
    ("fine_grained_activation_offloading", "--fine-grained-activation-offloading"),
    ("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm"),
    ("moe_paged_stash", "--moe-paged-stash"),
    ("cuda_graph_impl", "--cuda-graph-impl"),
]


@pytest.mark.parametrize(("switch", "flag"), [*SWITCHES, ("cpu_offloading_num_layers", "--cpu-offloading-num-layers")])
def test_megatrons_own_offloading_in_the_arguments_is_refused(switch: str, flag: str, wrap: Wrap) -> None:
    with pytest.raises(ConfigError, match=f"--actoffload-target='nvme': cannot be used with {flag}:"):
        wrap(**{switch: 1})
    args = parse("--actoffload-target none")
    setattr(args, switch, 1)
    assert wrap_forward_step(no_step, args).offloader is None


@pytest.mark.parametrize(("switch", "flag"), SWITCHES)
def test_megatrons_own_offloading_in_the_model_is_refused(switch: str, flag: str, wrap: Wrap) -> None:
    with pytest.raises(ConfigError, match=f"--actoffload-target='nvme': cannot be used with {flag}:"):
        wrap()(None, chunk_with(**{switch: True}))


@pytest.mark.parametrize("nothing", [None, torch.nn.Linear(1, 1)])
def test_a_call_without_a_megatron_model_is_an_error(nothing: Any, wrap: Wrap) -> None:
    with pytest.raises(ConfigError, match="without a Megatron model"):
        wrap()(None, nothing)


def test_a_megatron_core_that_lacks_something_is_named(monkeypatch: pytest.MonkeyPatch, wrap: Wrap) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.num_microbatches_calculator", None)
    microbatches.core.cache_clear()  # forget an import that succeeded
    with pytest.raises(ConfigError, match=r"megatron-core='[0-9.]+': lacks .*num_microbatches_calculator"):
        wrap()
