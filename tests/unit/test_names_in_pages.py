"""Every name in a page exists: dotted names, options, counts, commands, flags and files, in code spans and blocks.

Names of PyTorch, frameworks and the shell are listed in `THEIRS`, placeholders for a reader's own names in `YOURS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer.main

import actoffload
from actoffload import OffloadConfig
from actoffload.tools.app import app
from tests import pages

ROOT = pages.ROOT
SOURCES = [*ROOT.glob("actoffload/**/*.py"), *ROOT.glob("integrations/**/*.py"), *ROOT.glob("benchmarks/*.py")]
FILE = re.compile(r"[\w./-]+\.(?:py|md|json|cpp|html|svg|png|ipynb|toml)")
DOTTED = re.compile(r"(?<![\w./])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
CLASSES = {"offloader": "Offloader", "attachment": "Attachment", "statistics": "Statistics", "profile": "Profile"}
CLASSES |= {name: name for name in actoffload.__all__ if name[0].isupper()}
"""Our classes, by their names and by those of their objects in all pages."""
OPTIONS = {field.name for field in fields(OffloadConfig)}
THEIRS = {
    "torch": "allow_cache_entry_mutation allow_mutation_on_saved_tensors context_fn create_graph fullgraph fully_shard "
    "make_fx no_sync param_dtype preserve_rng_state reduce_dtype respect_saved_tensors_hooks retain_graph "
    "saved_tensors_hooks TORCH_DEVICE_BACKEND_AUTOLOAD unsafe_chunk",
    "transformers and accelerate": "Accelerator.prepare activation_checkpointing_kwargs auto_find_batch_size log_level "
    "gradient_checkpointing gradient_checkpointing_kwargs load_state model_init report_to save_model save_state "
    "use_reentrant",
    "lightning": "activation_checkpointing_policy",
    "diffusers and timm": "enable_gradient_checkpointing set_grad_checkpointing",
    "axolotl and ms-swift": "activation_cpu_offload fsdp_config layer_offloading legacy hidden_states",
    "LLaMA-Factory": "MCA USE_MCA USE_V1 use_reentrant_gc use_unsloth_gc",
    "unsloth": "get_peft_model use_gradient_checkpointing",
    "verl": "FSDPEngine actor_rollout_ref enable_activation_offload engine sft_trainer",
    "OneTrainer and litgpt": "fabric offload_fraction trainer.model.transformer trainer.model.unet",
    "trl": "SFTTrainer activation_offloading",
    "deepspeed": "aio_handle buffer_count non_reentrant_checkpoint overlap_step partition_activations "
    "stage3_max_live_parameters stage3_max_reuse_distance super_offload",
    "megatron": "extra_args_provider gpt_config_from_args hybrid_config_from_args parse_and_validate_args pretrain "
    "pretrain_cfg_container_from_args",
    "torchtitan": "TRAIN_FILE",
    "torch_remat": "recompute_needs_tensor",
    "NVIDIA's driver": "get_user_pages os_lock_user_pages",
    "the Makefile": "PIP_ARGS",
}
YOURS = "args config data datasets forward_step hidden model model_provider model_type task trainer"
FOREIGN = {name for names in (*THEIRS.values(), YOURS) for name in names.split()}
THEIR_FLAGS = (
    "--compile.enable --compile.memory_policy --compile.mode --config --cpu-offloading --cpu-offloading-num-layers "
    "--cuda-graph-impl --fine-grained-activation-offloading --help --its-own --module --moe-paged-stash "
    "--nproc-per-node --offload-modules "
    "--gradient_checkpointing_kwargs --overlap-moe-expert-parallel-comm --pp --recompute-granularity "
    "--training.disable_cuda_graphs --gradient_checkpointing --gradient_checkpointing_cpu_offload --dataset_config "
    "--blocks_to_swap --block_swap_h2d_only --fp8_scaled --dataset"
)
YOUR_FILES = re.compile(
    r"(?:train|run|run\.rank0|before|plan|profile|config|page|FILE|mine)\.(?:py|json|html)|.*_DATE\.json"
)
THEIR_FILES = re.compile(r"torch/.*|kernel-open/.*|.*cudagraph_trees\.py")
PLACES = [ROOT / name for name in ("", "docs", "actoffload", "benchmarks", "benchmarks/results", "tests/unit")]


@cache
def identifiers() -> set[str]:
    """All words of the sources."""
    return {word for file in SOURCES for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}


def codes() -> Iterator[tuple[str, str, str]]:
    """Where code stands, its kind (``span`` or the language of a block), and its text."""
    for name, kind, text in pages.pieces():
        if kind == "prose":
            yield from ((name, "span", " ".join(span.split())) for span in re.findall(r"`([^`]+)`", text))
        elif kind in ("python", "bash"):
            yield name, kind, text


def spans(pattern: str) -> Iterator[tuple[str, re.Match[str]]]:
    """The spans that are all of a pattern, and where each stands."""
    for place, kind, text in codes():
        found = re.fullmatch(pattern, text) if kind == "span" and "upstream" not in place else None
        if found is not None:
            yield place, found


@cache
def defined(file: Path) -> set[str]:
    """The names that a module defines, and those that its classes define, as ``Class.member``."""
    text, name = file.read_text(encoding="utf-8"), r"(?:class |def )?(\w+)(?=\(|:| =)"
    found = set(re.findall(f"^{name}", text, re.MULTILINE))
    for cls, body in re.findall(r"^class (\w+).*\n((?:(?: .*)?\n)+)", text, re.MULTILINE):
        members = re.findall(f"^    {name}|\\bself\\.(\\w+)", body, re.MULTILINE)
        found |= {f"{cls}.{member or attribute}" for member, attribute in members}
    return found


@cache
def ours() -> set[str]:
    """Our modules, the names in each, and the public names with the members of their classes."""
    found = {f"actoffload.{name}" for name in (*actoffload.__all__, "__all__")}
    for file in SOURCES:
        parts = ["actoffload", *file.relative_to(ROOT).with_suffix("").parts]
        module = ".".join(part for part in parts if part != "__init__").replace("actoffload.actoffload", "actoffload")
        of_classes = {name for name in defined(file) if name.partition(".")[0] in CLASSES}
        found |= {module, *(f"{module}.{name}" for name in defined(file))}
        found |= {*of_classes, *(f"actoffload.{name}" for name in of_classes)}
    return found


def test_dotted_names() -> None:
    wrong = []
    for place, _, text in codes():
        without_calls = re.sub(r"\([^()]*\)", "", re.sub(r"\([^()]*\)", "", text))
        for name in set(DOTTED.findall(without_calls)) - FOREIGN:
            if not FILE.fullmatch(name):
                used = [f"{CLASSES[each]}.{member}" for each, member in pairwise(name.split(".")) if each in CLASSES]
                used += [name] if name.startswith("actoffload.") else []
                wrong += [f"{place}: {each}" for each in used if each not in ours()]
    assert wrong == []


def test_options_and_other_keywords() -> None:
    """In a span such as ``keep_last_bytes=0``, and in calls of ours in blocks."""
    variables = {"ACTOFFLOAD", *(f"ACTOFFLOAD_{name.upper()}" for name in (*OPTIONS, "native"))}
    known = OPTIONS | FOREIGN | variables
    assert [found[0] for _, found in spans(r"(\w+) ?=(?!=).*") if found[1] not in known] == []
    ways_in = {"attach", "offload_activations", "OffloadConfig"}
    for place, kind, text in codes():
        calls = ast.walk(ast.parse(text)) if kind == "python" else ()
        for call in (node for node in calls if isinstance(node, ast.Call)):
            if ast.unparse(call.func).rpartition(".")[2] in ways_in:
                passed = {keyword.arg for keyword in call.keywords if keyword.arg}
                assert passed <= OPTIONS | {"model"}, place


def test_identifiers() -> None:
    """Counts, functions and keys, as ``resident_peak_bytes`` and ``add_actoffload_args``."""
    known = identifiers() | FOREIGN | {file.stem for file in SOURCES}
    assert [found[0] for _, found in spans(r"(\w*[a-z]_\w+)(?:\(.*\))?") if found[1] not in known] == []


def test_commands_and_flags() -> None:
    root: Any = typer.main.get_command(app)
    commands = {name: root.get_command(None, name) for name in root.list_commands(None)}
    flags = {name for command in commands.values() for each in command.params for name in each.opts}
    texts = [file.read_text(encoding="utf-8") for file in (*SOURCES, ROOT / "tests" / "conftest.py")]
    flags |= {flag for text in texts for flag in re.findall(r'"(--[a-z][\w-]*)"', text)}
    flags |= set(THEIR_FLAGS.split())
    for option in (*OPTIONS, "modules", "exclude_modules", "checkpointing"):
        dashed = option.replace("_", "-")
        flags |= {f"--actoffload_{option}", f"--actoffload-{dashed}", f"--activation-checkpoint.{option}"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    wrong = []
    for place, kind, text in codes():
        if kind == "python" or "upstream" in place:
            continue
        wrong += [f"{place}: {flag}" for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", text) if flag not in flags]
        named = re.findall(r"^actoffload ([a-z]+)\b", text, re.MULTILINE)
        wrong += [f"{place}: actoffload {name}" for name in named if name not in commands]
        made = re.findall(r"^make ([a-z][\w-]*)", text, re.MULTILINE)
        wrong += [f"{place}: make {name}" for name in made if name not in targets]
    assert wrong == []


def test_files() -> None:
    rooms = [path for path in (*(ROOT / "actoffload").iterdir(), ROOT / "integrations") if path.is_dir()]
    wrong = []
    for place, kind, text in codes():
        for name in FILE.findall(text) if kind == "span" and "upstream" not in place else ():
            there = any((folder / name).exists() for folder in (*PLACES, *rooms))
            if not there and not YOUR_FILES.fullmatch(name) and not THEIR_FILES.fullmatch(name):
                wrong.append(f"{place}: {name}")
    assert wrong == []


def test_tests_that_sources_name() -> None:
    """Each number of the planner, for example, names where it comes from."""
    files = [*ROOT.glob("tests/**/*.py"), *SOURCES]
    defines, names = re.compile(r"^ *def (test_\w+)", re.MULTILINE), re.compile(r"\btest_\w+")
    known = {name for file in files for name in [file.stem, *defines.findall(file.read_text(encoding="utf-8"))]}
    named = {name for file in SOURCES for name in names.findall(file.read_text(encoding="utf-8"))}
    assert named - known == set()


# -- docs/how-it-works.md ----------------------------------------------------------------------------------------------

HOW_IT_WORKS = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")


def test_each_name_is_defined_in_a_file_that_the_page_names() -> None:
    files = set(re.findall(r"`((?:\w+/)*\w+\.py)`", HOW_IT_WORKS))
    known = set[str]().union(*(defined(ROOT / "actoffload" / file) for file in files if "tests" not in file))
    names = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", HOW_IT_WORKS)
    assert [name for name in names if name not in known and not FILE.fullmatch(name)] == []


def test_a_tensor_passes_at_most_eight_files_on_its_way_out() -> None:
    way_out = HOW_IT_WORKS[HOW_IT_WORKS.index("## Out") : HOW_IT_WORKS.index("## Back up")]
    assert len(re.findall(r"^\d+\. `", way_out, re.MULTILINE)) <= 8
