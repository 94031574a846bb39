"""Programs as a new user writes them, with every framework, with and without the library: what leaves the process.

    python -m benchmarks.frameworks_cpu [--rounds N] [--cases NAME ...] [--jobs N] [--path DIR]

Each runs in a fresh process. The peak of its resident memory (``VmHWM``, from the beginning of training on) must fall
by at least half of what the library says has left: the peak of saved bytes, less that of those that were resident.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

import actoffload
from actoffload.tools.process import peak_rss_bytes, rss_bytes
from benchmarks import harness
from benchmarks.harness import Bound, Row, Sample, Samples, middle
from benchmarks.worker import say

Options = dict[str, Any] | None
"""For the library; None to do without."""
Program = tuple[Callable[[], object], Callable[[], Any]]
"""What trains, and what gives the offloader afterwards."""
STEPS, BATCH, LENGTH, WIDTH, WORDS = 4, 64, 128, 64, 512
LIMIT_S, GONE_BOUND = 1800.0, 0.5
QUIET: dict[str, Any] = dict(use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=STEPS)
QUIET |= dict(per_device_train_batch_size=BATCH, dataloader_pin_memory=False)


def llama(layers: int = 6) -> Any:
    sizes: dict[str, Any] = dict(hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=layers)
    sizes |= dict(vocab_size=WORDS, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))


def tokens(count: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (count, length))


def attach(model: nn.Module, options: Options) -> Callable[[], Any]:
    attachment = None if options is None else actoffload.attach(model, **options)
    return lambda: attachment and attachment.offloader


def attach_trainer(trainer: Any, options: Options) -> Program:
    from actoffload.integrations import hf

    attachment = None if options is None else hf.attach(trainer, **options)
    return trainer.train, lambda: attachment and attachment.offloader


def loop(model: Any, backward: Callable[[Tensor], object], *after: Callable[[], object]) -> None:
    for _ in range(STEPS):
        batch = tokens(BATCH)
        backward(model(input_ids=batch, labels=batch).loss)
        for call in after:
            call()


def plain(options: Options, model: Any = None) -> Program:
    model = model or llama()
    offloader = attach(model, options)
    optimizer = torch.optim.AdamW(model.parameters())
    return lambda: loop(model, Tensor.backward, optimizer.step, optimizer.zero_grad), offloader


def accelerate(options: Options) -> Program:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), llama()
    offloader = attach(model, options)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return lambda: loop(model, accelerator.backward, optimizer.step, optimizer.zero_grad), offloader


def join() -> None:
    """Make a process group of one."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def fsdp2(options: Options) -> Program:
    from torch.distributed.fsdp import fully_shard

    join()
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    return plain(options, fully_shard(model))


def lightning(options: Options) -> Program:
    import lightning.pytorch as pl

    class Language(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, batch: Tensor, index: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    model = Language()
    quiet: dict[str, Any] = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=STEPS, logger=False, **quiet)
    data: Any = tokens(STEPS * BATCH)
    return lambda: trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=BATCH)), attach(model, options)


def trainer(options: Options, model: Any = None, **more: Any) -> Program:
    arguments = TrainingArguments(tempfile.mkdtemp(), **{**QUIET, **more})
    rows = tokens(STEPS * arguments.per_device_train_batch_size)
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    return attach_trainer(Trainer(model or llama(), arguments, train_dataset=data), options)


def trainer_checkpointing(options: Options) -> Program:
    """Only the inputs of layers are saved: there are many."""
    return trainer(options, llama(layers=40), gradient_checkpointing=True, per_device_train_batch_size=2 * BATCH)


def texts(**lengths: int) -> dict[str, Any]:
    """What TRL's trainers take: columns of texts of so many words, and who knows the words."""
    inner = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    knows = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1", bos_token="w2")
    rows = {name: tokens(STEPS * BATCH, length).tolist() for name, length in lengths.items()}
    columns = {name: [" ".join(f"w{number}" for number in row) for row in of_name] for name, of_name in rows.items()}
    return {"train_dataset": Dataset.from_dict(columns), "processing_class": knows}


def trl_sft(options: Options) -> Program:
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    config = SFTConfig(tempfile.mkdtemp(), max_length=LENGTH, gradient_checkpointing=False, **QUIET)
    return attach_trainer(SFTTrainer(llama(), config, **texts(text=LENGTH)), options)


def trl_dpo(options: Options) -> Program:
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    folder, part = tempfile.mkdtemp(), LENGTH // 4
    llama().save_pretrained(folder)  # the reference model is loaded from where the model is from
    config = DPOConfig(folder, max_length=LENGTH // 2, gradient_checkpointing=False, **QUIET)
    return attach_trainer(DPOTrainer(folder, args=config, **texts(prompt=part, chosen=part, rejected=part)), options)


def deepspeed(options: Options) -> Program:
    from actoffload.integrations import deepspeed as adapter

    join()
    model = llama()
    config = dict(train_micro_batch_size_per_gpu=BATCH, zero_optimization={"stage": 2})
    config |= dict(zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False)
    config |= {} if options is None else {"actoffload": options}
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = adapter.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return lambda: loop(engine, engine.backward, engine.step), lambda: engine.actoffload and engine.actoffload.offloader


def megatron(options: Options) -> Program:
    from actoffload.integrations.megatron import pretrain_gpt

    sizes = f"--layers 6 --width {WIDTH} --seq {LENGTH} --micro-batch {BATCH} --microbatches 1 --steps {STEPS}"
    flags = [f"--actoffload-{name}={value}" for name, value in (options or {}).items()]
    args = pretrain_gpt.parse([*sizes.split(), *flags])
    steps: list[Any] = []
    wrap = pretrain_gpt.wrap_forward_step

    def noted(*given: Any) -> Any:
        steps.append(wrap(*given))
        return steps[0]

    def train() -> None:
        pretrain_gpt.wrap_forward_step = noted
        with pretrain_gpt.cpu_stands_in_for_cuda():
            pretrain_gpt.join()
            pretrain_gpt.set_up(args)
            pretrain_gpt.train(args)

    return train, lambda: steps[0].offloader


TRAINERS = (trainer, trainer_checkpointing, trl_sft, trl_dpo)
CASES = {case.__name__: case for case in (plain, *TRAINERS, deepspeed, megatron, fsdp2, lightning, accelerate)}


def work(case: str, path: str, offloads: bool) -> None:
    """One program, in a process of its own; prints its peak, and what the library says."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with contextlib.redirect_stdout(sys.stderr):
        train, offloader = CASES[case]({"target": "nvme", "path": path} if offloads else None)
        before = rss_bytes()
        with contextlib.suppress(OSError):  # begin the peak of resident memory anew
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        train()
        peak, found = peak_rss_bytes(), offloader()
    say({"before_bytes": before, "peak_bytes": peak, "statistics": found.statistics().as_dict() if found else None})


def summarise(keep: list[Sample], offload: list[Sample]) -> Row:
    """The medians of one program. Bytes."""
    saved, resident = (middle(offload, "statistics", f"{name}_peak_bytes") for name in ("baseline", "resident"))
    peaks = {f"{name}_peak_bytes": middle(of, "peak_bytes") for name, of in (("keep", keep), ("offload", offload))}
    fell = peaks["keep_peak_bytes"] - peaks["offload_peak_bytes"]
    counts = {"saved_bytes": saved, "resident_bytes": resident, "left_bytes": saved - resident, "fell_bytes": fell}
    return peaks | counts | {"gone_share": fell / (saved - resident)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result file; 1 when a program failed or its peak did not fall enough."""
    parser = harness.make_parser(__doc__, rounds=1)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="only these")
    parser.add_argument("--jobs", type=int, default=2, help="programs that run at a time")
    options = parser.parse_args(arguments)
    sizes = {"steps": STEPS, "batch": BATCH, "length": LENGTH, "width": WIDTH, "words": WORDS, "threads": 1}
    results = harness.Results("frameworks_cpu", arguments, sizes)
    wanted = [(name, offloads) for _ in range(options.rounds) for name in options.cases for offloads in (False, True)]

    def sample(what: tuple[str, bool]) -> Sample:
        spec = {"case": what[0], "offloads": what[1], "path": options.path or tempfile.gettempdir()}
        found = harness.run_sample("benchmarks.frameworks_cpu", spec, timeout_s=LIMIT_S)
        print(what, found.get("error") or harness.mib(found["peak_bytes"]), flush=True)
        return found

    samples: dict[str, Samples] = {name: {"keep": [], "offload": []} for name in options.cases}
    with ThreadPoolExecutor(options.jobs) as pool:  # only memory is measured, so several may run at a time
        for (name, offloads), found in zip(wanted, pool.map(sample, wanted), strict=True):
            samples[name]["offload" if offloads else "keep"].append(found)
            results.write(samples=samples)
    failed = [name for name, taken in samples.items() if any("error" in one for both in taken.values() for one in both)]
    rows = {name: summarise(**taken) for name, taken in samples.items() if name not in failed}
    shown = {"saved": "saved", "left": "left", "VmHWM, keep": "keep_peak", "offload": "offload_peak", "fell": "fell"}
    table = harness.markdown_table(
        ("one thread, defaults", *shown, "fell / left"),
        [
            (name, *(harness.mib(row[f"{key}_bytes"]) for key in shown.values()), f"{row['gone_share']:.0%}")
            for name, row in rows.items()
        ],
    )
    bounds = [
        Bound(what=f"{name}: fell / left", measured=row["gone_share"], bound=GONE_BOUND, at_most=False)
        for name, row in rows.items()
    ]
    hold = results.finish(table, bounds, summary=rows)
    return 0 if hold and not failed else 1


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        work(**json.loads(sys.argv[1]))
    else:
        raise SystemExit(main())
