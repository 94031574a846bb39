"""TRL's trainers with the adapter: supervised, preferences, and reinforcement with generation."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.evidence import assert_evidence
from tests.integration.hf_models import QUIET, attached, compare, llama, make_trainer, sentence, tokenizer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
for _package in ("trl", "peft", "datasets"):
    pytest.importorskip(_package)

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer  # noqa: E402
from trl.models.activation_offloading import NoOpManager  # noqa: E402
from trl.trainer.dpo_config import DPOConfig  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.grpo_config import GRPOConfig  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.kto_config import KTOConfig  # noqa: E402
from trl.trainer.kto_trainer import KTOTrainer  # noqa: E402
from trl.trainer.reward_config import RewardConfig  # noqa: E402
from trl.trainer.reward_trainer import RewardTrainer  # noqa: E402
from trl.trainer.rloo_config import RLOOConfig  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402
from trl.trainer.sft_config import SFTConfig  # noqa: E402
from trl.trainer.sft_trainer import SFTTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:trl.*", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model on disk, because TRL loads the reference model from the model's path."""
    path = tmp_path_factory.mktemp("model")
    llama(dropout=0.1).save_pretrained(path)
    return str(path)


def lora(kind: str) -> Any:
    if kind != "lora":
        return None
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")


def make(trainer: Any, model: str, config: Any, data: Dataset, kind: str, **more: Any) -> Any:
    """A trainer; with adapters if ``kind`` is "lora"."""
    return trainer(model, args=config, train_dataset=data, processing_class=tokenizer(), peft_config=lora(kind), **more)


def sft(model: str, out: Path, kind: str, **options: Any) -> Any:
    data = Dataset.from_dict({"text": [sentence(seed) for seed in range(16)]})
    config = SFTConfig(str(out), max_length=32, packing=kind == "packing", **{**QUIET, **options})
    return make(SFTTrainer, model, config, data, kind)


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": [sentence(seed, 6) for seed in range(16)]})


def preferences() -> Dataset:
    columns = {"prompt": (0, 8), "chosen": (100, 12), "rejected": (200, 10)}
    return Dataset.from_dict(
        {name: [sentence(first + seed, words) for seed in range(16)] for name, (first, words) in columns.items()}
    )


def dpo(model: str, out: Path, kind: str, **options: Any) -> Any:
    config = DPOConfig(str(out), max_length=32, **{**QUIET, **options})
    return make(DPOTrainer, model, config, preferences(), kind)


def kto(model: str, out: Path, kind: str) -> Any:
    columns = {"completion": [sentence(100 + seed, 12) for seed in range(16)], "label": [True, False] * 8}
    data = Dataset.from_dict({"prompt": [sentence(seed, 8) for seed in range(16)], **columns})
    config = KTOConfig(str(out), max_length=32, **QUIET)
    return make(KTOTrainer, model, config, data, kind)


def rewarding(model: str, out: Path, kind: str) -> Any:
    config = RewardConfig(str(out), max_length=32, **QUIET)
    return make(RewardTrainer, model, config, preferences(), kind)


def reward(completions: list[str], **_: Any) -> list[float | None]:
    """Prefers words that contain a 3."""
    return [float(text.count("3")) + 0.01 * len(text) for text in completions]


def grpo(model: str, out: Path, kind: str, **options: Any) -> Any:
    chosen = {"num_generations": 4, "max_completion_length": 8, "num_iterations": 2, "beta": 0.1}
    config = GRPOConfig(str(out), **{**QUIET, **chosen, **options})
    return make(GRPOTrainer, model, config, prompts(), kind, reward_funcs=reward)


def rloo(model: str, out: Path, kind: str) -> Any:
    config = RLOOConfig(str(out), num_generations=4, max_completion_length=8, **QUIET)
    return make(RLOOTrainer, model, config, prompts(), kind, reward_funcs=reward)


def online_dpo(model: str, out: Path, kind: str) -> Any:
    """Its ``training_step`` computes all by itself, without ``compute_loss``."""
    config = OnlineDPOConfig(str(out), max_new_tokens=8, **QUIET)
    return make(OnlineDPOTrainer, model, config, prompts(), kind, reward_funcs=reward)


ROWS = [
    *[(one, kind) for one in (dpo, grpo) for kind in ("plain", "lora")],
    *[(sft, "lora"), (sft, "packing"), (kto, "plain"), (rewarding, "plain"), (rloo, "plain"), (online_dpo, "plain")],
]


@pytest.mark.parametrize(("trainer", "kind"), ROWS, ids=[f"{one.__name__} {kind}" for one, kind in ROWS])
def test_a_trainer_computes_the_same_bits(trainer: Any, kind: str, model_path: str, tmp_path: Path) -> None:
    offloaded, plain = compare(lambda: trainer(model_path, tmp_path / "out", kind), tmp_path, device_budget="16KiB")
    assert_evidence(offloaded, plain)
    assert len({loss.item() for loss in plain.losses}) > 1


@pytest.mark.parametrize("kind", [sft, dpo])
def test_its_own_flag_is_taken_over(
    kind: Any, model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TRL's own context raises without an accelerator, so that NoOpManager stands for it.
    theirs: Any = NoOpManager()
    for module in ("sft", "dpo"):
        monkeypatch.setattr(f"trl.trainer.{module}_trainer.get_act_offloading_ctx_manager", lambda model: theirs)
    trainer = kind(model_path, tmp_path / "out", "plain", activation_offloading=True)
    with attached(trainer, target="nvme", path=tmp_path):
        assert isinstance(trainer.maybe_activation_offload_context, nullcontext)
    assert trainer.maybe_activation_offload_context is theirs


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator has what both ask for")
def test_without_us_a_target_means_true_and_fails_on_a_cpu(model_path: str, tmp_path: Path) -> None:
    """docs/integrations.md describes this; test_switch.py has the same flags with the switch."""
    # TRL asks for an accelerator's streams; PyTorch has no accelerator, or CUDA without a GPU.
    with pytest.raises((AttributeError, RuntimeError), match=r"'NoneType' object has no attribute 'type'|CUDA"):
        sft(model_path, tmp_path / "out", "plain", activation_offloading="nvme")
    chosen = {"use_reentrant": False, "offload": "nvme"}
    trainer = make_trainer(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs=chosen)
    # Without a GPU, PyTorch built for CUDA goes on with unpinned memory.
    built = torch.backends.cuda.is_built()
    with nullcontext() if built else pytest.raises(RuntimeError, match="pin_memory=True requires"):
        trainer.train()


def test_its_own_flag_is_taken_over_when_it_comes_later(model_path: str, tmp_path: Path) -> None:
    trainer = sft(model_path, tmp_path / "out", "plain")
    with attached(trainer, target="nvme", path=tmp_path, min_bytes=1024) as offloader:
        theirs: Any = NoOpManager()
        trainer.maybe_activation_offload_context = theirs
        trainer.train()
        assert isinstance(trainer.maybe_activation_offload_context, nullcontext)
        assert offloader.statistics().moved_bytes > 0
    assert trainer.maybe_activation_offload_context is theirs
