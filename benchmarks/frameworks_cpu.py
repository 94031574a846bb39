"""Programs with every framework, as the examples have them, with and without the library: what leaves the process.

    python -m benchmarks.frameworks_cpu [--rounds N] [--cases NAME ...] [--jobs N] [--path DIR]

Each runs in a fresh process. The peak of its resident memory (``VmHWM``, from the beginning of training on) must fall
by at least half of what the library says has left: the peak of saved bytes, less that of those that were resident.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actoffload.tools.environment import peak_rss_bytes, rss_bytes
from benchmarks import harness
from benchmarks.harness import Bound, Row, Sample, Samples, mib, middle
from benchmarks.worker import say
from tests.integration.evidence import noting_offloaders

Train = Callable[[], object]
STEPS, BATCH, LENGTH, WIDTH, WORDS, LAYERS = 4, 64, 128, 64, 512, 6
LIMIT_S, GONE_BOUND = 1800.0, 0.5
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def example(name: str, *more: str, path: str | None) -> Train:
    """A file of ``integrations``; without a path, without the library."""
    module = importlib.import_module(f"actoffload.integrations.{name}")
    flags = f"--layers {LAYERS} --width {WIDTH} --seq {LENGTH} --steps {STEPS}".split()
    flag = "--actoffload-" if name.startswith("megatron") else "--"
    if path is not None:
        flags += [f"{flag}target=nvme", f"{flag}path={path}"]
    elif flag == "--":
        flags += ["--target=none"]
    if "titan" in name:
        os.environ.update(ALONE)
    sys.argv = [name, *flags, *more]
    return module.main  # type: ignore[no-any-return]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS}
    words: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes, **words))


def trl_sft(path: str | None) -> Train:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from actoffload.integrations import hf

    inner = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    knows = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1", bos_token="w2")
    rows = torch.randint(3, WORDS, (STEPS * BATCH, LENGTH)).tolist()
    data = Dataset.from_dict({"text": [" ".join(f"w{number}" for number in row) for row in rows]})
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    quiet |= {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "dataloader_pin_memory": False}
    config = SFTConfig(tempfile.mkdtemp(), max_length=LENGTH, gradient_checkpointing=False, **quiet)
    trainer = SFTTrainer(llama(), config, train_dataset=data, processing_class=knows)
    if path is not None:
        hf.attach(trainer, target="nvme", path=path)
    train: Train = trainer.train
    return train


def join_alone() -> None:
    """Join a group of one process for DeepSpeed."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does; this would be compiled for a minute
    os.environ.update(ALONE)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def deepspeed(path: str | None) -> Train:
    from actoffload.integrations import deepspeed as adapter

    join_alone()
    model = llama()
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 2}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config |= {} if path is None else {"actoffload": {"target": "nvme", "path": path}}
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = adapter.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def train() -> None:
        for _ in range(STEPS):
            tokens = torch.randint(3, WORDS, (BATCH, LENGTH))
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

    return train


ROWS = ("--batch", str(BATCH))
CASES: dict[str, Callable[..., Train]] = {
    "plain": partial(example, "examples.plain_loop", *ROWS),
    "trainer": partial(example, "examples.hf_loop", *ROWS),
    "lightning": partial(example, "examples.lightning_loop", *ROWS, "--accelerator", "cpu", "--accumulate", "1"),
    "fsdp2": partial(example, "examples.titan_loop", *ROWS, "--microbatches", "1"),
    "megatron": partial(example, "megatron.pretrain_gpt", "--micro-batch", str(BATCH), "--microbatches", "1"),
    "trl_sft": trl_sft,
    "deepspeed": deepspeed,
}


def work(case: str, path: str, offloads: bool) -> None:
    """One program, in a process of its own; prints its peak, and what the library says."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with contextlib.redirect_stdout(sys.stderr), noting_offloaders() as made:
        train = CASES[case](path=path if offloads else None)
        before = rss_bytes()
        with contextlib.suppress(OSError):  # begin the peak of resident memory anew
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        train()
        peak = peak_rss_bytes()
    statistics = made[-1].statistics().as_dict() if made else None
    say({"before_bytes": before, "peak_bytes": peak, "statistics": statistics})


def summarise(keep: list[Sample], offload: list[Sample]) -> Row:
    """The medians of one program. Bytes."""
    saved, resident = (middle(offload, "statistics", f"{name}_peak_bytes") for name in ("baseline", "resident"))
    row = {"keep_peak_bytes": middle(keep, "peak_bytes"), "offload_peak_bytes": middle(offload, "peak_bytes")}
    row |= {"saved_bytes": saved, "left_bytes": saved - resident}
    row["fell_bytes"] = row["keep_peak_bytes"] - row["offload_peak_bytes"]
    return row | {"gone_share": row["fell_bytes"] / row["left_bytes"]}


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
        print(what, found.get("error") or mib(found["peak_bytes"]), flush=True)
        return found

    samples: dict[str, Samples] = {name: {"keep": [], "offload": []} for name in options.cases}
    with ThreadPoolExecutor(options.jobs) as pool:  # only memory is measured, so several may run at a time
        for (name, offloads), found in zip(wanted, pool.map(sample, wanted), strict=True):
            samples[name]["offload" if offloads else "keep"].append(found)
            results.write(samples=samples)
    failed = [name for name, taken in samples.items() if any("error" in one for both in taken.values() for one in both)]
    rows = {name: summarise(**taken) for name, taken in samples.items() if name not in failed}
    shown = {"saved": "saved", "left": "left", "VmHWM, keep": "keep_peak", "offload": "offload_peak", "fell": "fell"}
    columns = {column: harness.number(f"{key}_bytes", 1 << 20, 0) for column, key in shown.items()}
    columns["fell / left"] = harness.number("gone_share", 1, 2)
    bounds = [
        Bound(what=f"{name}: fell / left", measured=row["gone_share"], bound=GONE_BOUND, at_most=False)
        for name, row in rows.items()
    ]
    hold = results.finish(harness.table_of("one thread, defaults, MiB", rows, columns), bounds, summary=rows)
    return 0 if hold and not failed else 1


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        work(**json.loads(sys.argv[1]))
    else:
        raise SystemExit(main())
