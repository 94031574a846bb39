"""transformers.Trainer, PEFT and Accelerate with the adapter: the same bits, with activations on disk."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from actoffload.integrations.hf import attach
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from actoffload.errors import ConfigError
from actoffload.integrations import switch
from tests.harness import assert_same_gradients
from tests.integration.evidence import assert_evidence, assert_same_run
from tests.integration.hf_models import (
    accelerate_loop,
    arguments,
    attached,
    checkpointing,
    compare,
    gpt2,
    images,
    llama,
    make_trainer,
    spool,
    t5,
    texts,
    train,
    vit,
)
from tests.integration.processes import launch
from tests.programs import FRAMEWORKS

for _package in ("accelerate", "peft"):
    pytest.importorskip(_package)

from accelerate.state import AcceleratorState  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402


def lora() -> Any:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    return get_peft_model(llama(), config)


@dataclass
class Row:
    name: str
    model: Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    examples: Callable[[], list[dict[str, Any]]] = texts
    budget: str = "128KiB"


ROWS = [
    Row("dropout", lambda: llama(dropout=0.2)),
    Row("lora", lora),
    Row("reentrant", llama, checkpointing(reentrant=True), budget="48KiB"),
    Row("lora, reentrant", lora, checkpointing(reentrant=True), budget="48KiB"),
    Row("lora, non-reentrant", lora, checkpointing(reentrant=False), budget="48KiB"),
    Row("tied head", lambda: llama(tied=True)),
    Row("tied head, dropout", gpt2),
    Row("evaluation at start", llama, {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}),
    Row("bf16", llama, {"bf16": True}),
    Row("neftune", llama, {"neftune_noise_alpha": 5.0}),
    Row("encoder and decoder", t5),
    Row("images", vit, examples=images, budget="48KiB"),  # it saves 66 KiB in all
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_trainer_computes_the_same_bits(row: Row, tmp_path: Path) -> None:
    def make() -> Trainer:
        options = arguments(tmp_path / "out", **row.arguments)
        examples: Any = row.examples()
        return Trainer(row.model(), options, train_dataset=examples, eval_dataset=examples[:4])

    offloaded, plain = compare(make, tmp_path, device_budget=row.budget)
    statistics = assert_evidence(offloaded, plain)
    assert statistics.steps == len(plain.losses)  # evaluation enters no context
    assert bool(statistics.regions) == ("non-reentrant" in row.name), "only these checkpoints leave a choice"
    assert "saved during backward" not in statistics.kept_bytes


def test_a_resumed_run_computes_the_same_bits(tmp_path: Path) -> None:
    def make() -> Any:
        return make_trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)

    options = spool(tmp_path)
    whole = train(make())
    train(make(), **options)  # leaves the checkpoint that both resume from
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    offloaded, plain = train(make(), resume=checkpoint, **options), train(make(), resume=checkpoint)
    assert len(plain.losses) == 2
    assert_evidence(offloaded, plain)
    assert_same_gradients(plain.tensors, {name: whole.tensors[name] for name in plain.tensors})


def test_two_trainers_have_plans_and_counts_of_their_own(tmp_path: Path) -> None:
    plain = train(make_trainer(tmp_path)), train(make_trainer(tmp_path, learning_rate=0.5))
    one, two = make_trainer(tmp_path), make_trainer(tmp_path, learning_rate=0.5)
    first, second = attach(one, **spool(tmp_path)), attach(two, **spool(tmp_path))
    assert first.offloader is not second.offloader
    for trainer, attachment, expected in ((one, first, plain[0]), (two, second, plain[1])):
        assert not attachment.offloader.statistics().nvme_written_bytes
        found = train(trainer)
        assert_same_run(found, expected)
        statistics = attachment.offloader.statistics()
        assert statistics.nvme_written_bytes > 0
        assert statistics.live_records == 0
        trainer.actoffload.detach()
        attachment.offloader.close()


def hooks(model: nn.Module) -> list[Any]:
    return [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()]


@pytest.mark.parametrize("options", [{}, {"exclude": "lm_head"}], ids=["plain", "names"])
def test_detach_leaves_the_trainer_as_it_was(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    before = dict(vars(trainer)), list(trainer.callback_handler.callbacks), hooks(trainer.model)
    attachment = attach(trainer, target="nvme", path=tmp_path, min_bytes=1024, **options)
    assert trainer.actoffload is attachment
    assert dict(vars(trainer)) != before[0]
    attachment.detach()
    attachment.detach()
    assert (dict(vars(trainer)), list(trainer.callback_handler.callbacks), hooks(trainer.model)) == before
    trainer.train()
    assert attachment.offloader.statistics().packed_tensors == 0
    again = attach(trainer, target="nvme", path=tmp_path, min_bytes=1024)
    again.detach()
    for one in (attachment, again):
        one.offloader.close()


def test_detach_in_the_middle_of_training(tmp_path: Path) -> None:
    class DetachAfterTwo(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer.actoffload.detach()

    trainer = make_trainer(tmp_path)
    trainer.add_callback(DetachAfterTwo())
    offloader = attach(trainer, target="nvme", path=tmp_path, min_bytes=1024).offloader
    found = train(trainer)
    assert_same_run(found, train(make_trainer(tmp_path)))
    assert offloader.statistics().steps == 2
    assert offloader.statistics().live_records == 0
    offloader.close()


def test_detach_leaves_wrappers_around_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    own = trainer.compute_loss = lambda *args, **kwargs: Trainer.compute_loss(trainer, *args, **kwargs)
    attachment = attach(trainer, target="nvme", path=tmp_path, min_bytes=1024)
    ours = trainer.compute_loss
    around = trainer.compute_loss = lambda *args, **kwargs: ours(*args, **kwargs)
    attachment.detach()
    assert trainer.compute_loss is around
    trainer.train()
    assert attachment.offloader.statistics().packed_tensors == 0
    trainer.compute_loss = own
    again = attach(trainer, target="nvme", path=tmp_path, min_bytes=1024)
    again.detach()
    assert trainer.compute_loss is own
    again.offloader.close()


class Whole(Trainer):
    """Its step computes the loss without ``compute_loss``, as in some of TRL's trainers."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        loss: Tensor = model(**self._prepare_inputs(inputs)).loss.square()
        self.accelerator.backward(loss)
        return loss.detach()


class Around(Trainer):
    """Its step wraps its parent's step, which calls ``compute_loss``."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        return loss * 1.0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = model(**inputs).logits.square().mean()
        return (loss, (None, None)) if return_outputs else loss


@pytest.mark.parametrize(("kind", "name"), [(Whole, "training_step"), (Around, "compute_loss")])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_subclass_computes_the_same_bits(kind: type[Trainer], name: str, reentrant: bool, tmp_path: Path) -> None:
    def make() -> Any:
        return make_trainer(tmp_path, kind, eval_strategy="steps", eval_steps=1, **checkpointing(reentrant=reentrant))

    assert assert_evidence(*compare(make, tmp_path, device_budget="48KiB")).steps == 3
    with attached(trainer := make(), target="nvme", path=tmp_path):
        assert {"training_step", "compute_loss"} & vars(trainer).keys() == {name}


def test_a_model_that_is_made_when_training_begins(tmp_path: Path) -> None:
    def make() -> Trainer:
        examples: Any = texts()
        return Trainer(args=arguments(tmp_path / "out"), train_dataset=examples, model_init=lambda: llama())

    # `exclude` has to find its name in the model that trains.
    assert_evidence(*compare(make, tmp_path, exclude="lm_head"))


def test_a_step_that_runs_out_of_memory_is_tried_again(tmp_path: Path) -> None:
    def make() -> Any:
        trainer = make_trainer(tmp_path, auto_find_batch_size=True)
        layer = trainer.model.model.layers[1]
        layer.register_forward_hook(fail_on_large_batches)
        return trainer

    def fail_on_large_batches(module: nn.Module, args: Any, output: Any) -> None:
        if len(args[0]) == 4:
            raise RuntimeError("CUDA out of memory.")

    assert_evidence(*compare(make, tmp_path, device_budget="96KiB"))


@pytest.fixture
def transformers_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log records of transformers, which do not propagate to the root logger."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)


def test_the_end_of_training_is_logged(tmp_path: Path, transformers_log: pytest.LogCaptureFixture) -> None:
    # "greedy", because a plan on a slow disk moves nothing, and statistics do not count steps without hooks.
    trainer = make_trainer(tmp_path, log_level="info")
    train(trainer, target="nvme", path=tmp_path, min_bytes=1024, policy="greedy")
    assert "actoffload (target nvme): 3 steps: activations' peak" in transformers_log.text
    assert "was never called" not in transformers_log.text


def test_the_history_of_logs_has_the_numbers_of_each_log(tmp_path: Path) -> None:
    trainer, sent = make_trainer(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2), list[dict[str, Any]]()

    class Logs(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            sent.append(ours(logs))

    def ours(log: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in log.items() if name.startswith("actoffload/")}

    trainer.add_callback(Logs())
    with attached(trainer, **spool(tmp_path)) as offloader:
        trainer.train()
        history = trainer.state.log_history
        assert [ours(entry) for entry in history] == sent
        assert [bool(ours(entry)) for entry in history] == ["loss" in entry for entry in history]
        moved = sum(entry.get("actoffload/moved_bytes", 0) for entry in history)
        assert moved == offloader.statistics().moved_bytes > 0
        trainer.state.save_to_json(str(tmp_path / "state.json"))


def test_the_first_training_has_a_line_and_each_a_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"target": "nvme", "path": tmp_path, "min_bytes": 1024}
    trainer = make_trainer(tmp_path)
    other, quiet = (Trainer(trainer.model, trainer.args, train_dataset=trainer.train_dataset) for _ in range(2))
    attachment = attach(trainer, **options)
    trainer.train()
    trainer.train()
    assert trainer.actoffload.report().startswith("actoffload (target nvme): ")
    attachment.detach()
    again = attach(other, **options)
    other.train()
    again.detach()
    silent = attach(quiet, **options, announce="none")
    quiet.train()
    quiet.train()
    silent.detach()
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("actoffload")]
    assert len(lines) == 1
    assert lines[0].startswith("actoffload: target nvme")
    for one in {attachment.offloader, again.offloader, silent.offloader}:
        one.close()


def test_a_trainer_that_passes_by_is_warned_of(tmp_path: Path, transformers_log: pytest.LogCaptureFixture) -> None:
    with attached(trainer := make_trainer(tmp_path), target="nvme", path=tmp_path):
        del trainer.compute_loss  # as a trainer that sets its own after attach()
        trainer.train()
    assert "compute_loss was never called" in transformers_log.text


# -- Accelerate's plain loop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("when", "precision"), [("before prepare", "no"), ("after prepare", "bf16")])
def test_a_loop_of_accelerate_computes_the_same_bits(when: str, precision: str, tmp_path: Path) -> None:
    AcceleratorState._reset_state(True)
    options = spool(tmp_path)
    offloaded, plain = accelerate_loop(when, precision, options), accelerate_loop(None, precision, options)
    AcceleratorState._reset_state(True)
    assert_evidence(offloaded, plain)


# -- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("tests.integration.workers.hf", 2, tmp_path_factory.mktemp("ranks"), modules=FRAMEWORKS)


@pytest.mark.parametrize("row", ["trainer", "checkpointing", "accelerate"])
def test_two_processes_compute_the_same_bits(row: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        offloaded, plain = rank[row]
        assert_evidence(offloaded, plain)
    first, second = (rank[row][1] for rank in ranks)
    assert not torch.equal(first.losses[0], second.losses[0])  # each rank has its own examples
    assert any(name.startswith("gradient") for name in first.tensors)
    weights = [name for name in first.tensors if name.startswith("weight")]
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in weights)


def test_one_of_two_processes_announces(ranks: list[dict[str, Any]]) -> None:
    assert [sum("actoffload: target nvme" in line for line in rank["printed"]) for rank in ranks] == [1, 0]


def test_a_section_for_deepspeed_holds_for_a_trainer(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    trainer = make_trainer(tmp_path)
    section = {"target": "nvme", "path": str(tmp_path), "min_bytes": 2048}
    trainer.args.hf_deepspeed_config = SimpleNamespace(config={"actoffload": section})
    with attached(trainer, min_bytes=1024) as offloader:
        assert (offloader.config.target, offloader.config.min_bytes) == ("nvme", 1024)


def test_a_section_that_is_switched_off_holds_for_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    trainer = make_trainer(tmp_path)
    trainer.args.hf_deepspeed_config = SimpleNamespace(config={"actoffload": {"enabled": False}})
    with pytest.raises(ConfigError, match=r"actoffload\.enabled=False: so says the DeepSpeed configuration"):
        attach(trainer, target="nvme", path=tmp_path)
    monkeypatch.setenv("ACTOFFLOAD", "floppy")  # reading it would raise
    module: Any = ModuleType("transformers.trainer")
    module.Trainer = type("Trainer", (), {"train": lambda trainer: hasattr(trainer, "actoffload")})
    switch.patch(module)
    assert module.Trainer.train(trainer) is False
    trainer.args.hf_deepspeed_config.config = {"activation_checkpointing": {"cpu_checkpointing": True}}
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.cpu_checkpointing=True"):
        attach(trainer, target="nvme", path=tmp_path)


def test_detach_leaves_no_reference_to_the_attachment(tmp_path: Path) -> None:
    """A reference keeps the data loader alive, and Accelerate would then step at each micro-batch of the next loop."""
    trainer = make_trainer(tmp_path)
    attachment = attach(trainer, target="nvme", path=tmp_path, min_bytes=1024)
    offloader, reference = attachment.offloader, weakref.ref(attachment)
    attachment.detach()
    gc.disable()
    try:
        del attachment
        assert reference() is None
    finally:
        gc.enable()
    offloader.close()
