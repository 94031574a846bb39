"""The rooms of docs/design.md, checked on the source text: floors, cycles, allowed imports, and sizes.

To add a room, give it a floor in `FLOORS`.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import quantiles

ROOT = Path(__file__).resolve().parents[2]

FLOORS = {
    0: "errors events locks policy sizes version memory.native_*",
    1: "memory memory.*",
    2: "storage storage.*",
    3: "planning planning.*",
    4: "config",
    5: "tiers tiers.* runtime.untraced",
    6: "runtime runtime.*",
    7: "autotune autotune.*",
    8: "tell tell.*",
    9: "autograd autograd.*",
    10: "api schedules",
    11: "__init__ __main__ tools tools.* testing testing.* integrations integrations.*",
}
"""Rooms by floor: a module imports from its own room and lower floors, and no module imports in a circle."""

TORCH_FREE = (
    "errors config events locks policy sizes version tiers.statistics memory.best_fit memory.native_build "
    "storage storage.* planning planning.* tools.trace_file runtime.trace_writer"
)
"""Modules that never import torch, directly or through another module of the package."""

OPTIONAL = {
    "aiofiles": "storage.engines.aiofiles",
    "cupy": "storage.engines.gds",
    "deepspeed": "integrations.deepspeed benchmarks.study",
    "diffusers": "benchmarks.workloads",
    "jinja2": "tools.report",
    "kvikio": "storage.engines.gds tools.doctor",
    "matplotlib": "tools.rok benchmarks.study",
    "megatron": "integrations.megatron integrations.megatron.*",
    "rich": "tools.*",
    "torch_remat": "integrations.remat",
    "torchtitan": "integrations.torchtitan",
    "transformers": "integrations.hf integrations.examples.layer_major_loop tools.models benchmarks.*",
    "typer": "tools.*",
    "tyro": "integrations.torchtitan",
}
"""Third parties that need not be there (or are heavy), and the only modules that may import them."""

FORMATS = ("VERSION", "ROUNDING", "MOST_BYTES", "_LARGEST")
"""Numbers of a file format and of floats, which need no tuning."""
MAX_TUNED = 25
"""Numbers of the planner, in one file, each followed by its unit and its source."""

PUBLIC_MODULES = (
    "__init__ errors schedules planning.profile planning.search planning.simulator testing testing.* "
    "tools.* integrations.*"
)
"""Modules that integrations and benchmarks may import; from the package itself only names in ``__all__``."""

PURE_CALLS = "isinstance issubclass len all any callable hasattr type min max sum set"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_P90_FUNCTION_LINES = 35

Sources = dict[str, str]


def read_sources(folder: str, prefix: str) -> Sources:
    """Source text by module name; a package has the name of its folder."""
    sources = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        parts = [prefix, *file.relative_to(ROOT / folder).with_suffix("").parts]
        name = ".".join(part for part in parts if part != "__init__")
        sources[name] = file.read_text(encoding="utf-8")
    return sources


ADAPTERS = read_sources("integrations", "actoffload.integrations")
PACKAGE = read_sources("actoffload", "actoffload") | ADAPTERS
BENCHMARKS = read_sources("benchmarks", "benchmarks")
parse = cache(ast.parse)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every node of the source text."""
    return tuple(ast.walk(parse(source)))


def last_name(expression: ast.expr) -> str:
    """The last part of a dotted name; empty for anything else."""
    return str(getattr(expression, "attr", getattr(expression, "id", "")))


def short(module: str) -> str:
    """The name in the tables above."""
    return module.removeprefix("actoffload").removeprefix(".") or "__init__"


def matches(module: str, patterns: str) -> bool:
    """Whether the table's ``patterns`` name ``module``; a star stands for the rest of the name."""
    name = short(module)
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def imports(module: str, source: str, sources: Sources, *, for_types: bool = False) -> Iterator[str]:
    """Full names of the modules that ``module`` imports, anywhere in it.

    Args:
        for_types: also count imports that only a type checker sees.
    """
    is_package = any(name.startswith(f"{module}.") for name in sources)
    skipped: set[ast.AST] = set()
    for node in nodes(source):
        if not for_types and isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING":
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        if node in skipped:
            continue
        if isinstance(node, ast.Call) and last_name(node.func) == "import_module" and node.args:
            if isinstance(name := node.args[0], ast.Constant):
                yield str(name.value)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield submodule if submodule in sources else base


def graph(sources: Sources, *, for_types: bool = False) -> dict[str, set[str]]:
    """The imports among ``sources``, by module."""
    return {
        module: set(imports(module, text, sources, for_types=for_types)) & set(sources) - {module}
        for module, text in sources.items()
    }


def test_floors() -> None:
    floors = {module: [floor for floor, rooms in FLOORS.items() if matches(module, rooms)] for module in PACKAGE}
    assert [module for module, found in floors.items() if not found] == [], "these have no floor in FLOORS"
    problems = [
        f"{module} (floor {floors[module][0]}) imports {target} (floor {floors[target][0]})"
        for module, targets in graph(PACKAGE).items()
        for target in targets
        if floors[target][0] > floors[module][0]
    ]
    assert problems == []


def in_circles(sources: Sources) -> set[str]:
    """The modules left after both ends of every chain of imports are removed again and again.

    Two modules that need each other's types cannot be read apart either, so imports for types count.
    """
    left = graph(sources, for_types=True)
    while True:
        imported = set[str]().union(*left.values())
        ends = {module for module, targets in left.items() if not targets or module not in imported}
        if not ends:
            return set(left)
        left = {module: targets - ends for module, targets in left.items() if module not in ends}


def test_no_import_cycles() -> None:
    assert in_circles(PACKAGE) == set()
    of_types = {
        "actoffload.config": "if TYPE_CHECKING:\n    from .locks import Lock\n",
        "actoffload.locks": "from .config import Config\n",
    }
    assert in_circles(of_types) == of_types.keys()


def test_rooms_without_torch() -> None:
    """Neither a module of these nor any that it imports, directly or not, imports torch."""
    tops = {m: {name.split(".")[0] for name in imports(m, text, PACKAGE)} for m, text in PACKAGE.items()}
    edges = graph(PACKAGE)
    for module in (module for module in PACKAGE if matches(module, TORCH_FREE)):
        reached, todo = set[str](), [module]
        while todo:
            if (current := todo.pop()) not in reached:
                reached.add(current)
                todo += edges[current]
        assert [each for each in reached if "torch" in tops[each]] == [], module


def test_optional_dependencies_stay_in_their_file() -> None:
    problems = [
        f"{module} imports {name}; only {OPTIONAL[top]} may"
        for module, text in (PACKAGE | BENCHMARKS).items()
        for name in imports(module, text, PACKAGE | BENCHMARKS)
        if (top := name.split(".")[0]) in OPTIONAL and not matches(module, OPTIONAL[top])
    ]
    assert problems == []


def test_integrations_and_benchmarks_use_public_names_only() -> None:
    import actoffload

    public = {*actoffload.__all__, "testing", "tools", "integrations"}
    problems = []
    for module, text in (ADAPTERS | BENCHMARKS).items():
        for name in imports(module, text, PACKAGE | BENCHMARKS):
            if name.split(".")[0] == "actoffload" and not matches(name, PUBLIC_MODULES):
                problems.append(f"{module} imports {name}")
        for node in nodes(text):
            used: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module == "actoffload":
                used = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "actoffload":
                used = [node.attr]
            problems += [f"{module} uses actoffload.{name}" for name in used if name not in public]
    assert problems == []


def test_sizes() -> None:
    """Of files and of functions, methods and inner ones too, from ``def`` to the end."""
    sources = PACKAGE | BENCHMARKS
    assert [module for module, text in sources.items() if text.count("\n") > MAX_FILE_LINES] == []
    lengths = {
        f"{module}.{node.name} line {node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for module, text in sources.items()
        for node in nodes(text)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert [name for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES] == []
    assert quantiles(lengths.values(), n=10)[-1] <= MAX_P90_FUNCTION_LINES


def test_no_work_inside_asserts() -> None:
    """``python -O`` drops them: only calls that surely change nothing may stand there."""
    problems = [
        f"{module} line {node.lineno}: {ast.unparse(call.func)}() inside an assert"
        for module, text in PACKAGE.items()
        if not matches(module, "testing.*")  # the conformance suite consists of tests
        for node in nodes(text)
        if isinstance(node, ast.Assert)
        for call in ast.walk(node.test)
        if isinstance(call, ast.Call) and ast.unparse(call.func) not in PURE_CALLS.split()
    ]
    assert problems == []


def number_problems(sources: Sources) -> list[str]:
    """Numbers of the planner outside its one file, without unit and source, or too many; a ``range`` names choices."""
    problems, names = [], 0
    for module, text in sources.items():
        statements = parse(text).body
        for statement, after in zip(statements, [*statements[1:], None], strict=True):
            if not matches(module, "planning.* autotune.*") or not isinstance(statement, (ast.Assign, ast.AnnAssign)):
                continue
            value, name = statement.value, ast.unparse(statement).split(" =")[0]
            values = [] if value is None else [n.value for n in ast.walk(value) if isinstance(n, ast.Constant)]
            numbers = any(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values)
            if not numbers or isinstance(value, ast.Call) or name in FORMATS:
                continue
            names += 1
            if short(module) != "planning.constants":
                problems.append(f"{module}.{name} belongs into planning.constants")
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                problems.append(f"{module}.{name} has no source")
    if names > MAX_TUNED:
        problems.append(f"{names} numbers, at most {MAX_TUNED}")
    return problems


def test_the_numbers_of_the_planner_are_few_and_have_a_source() -> None:
    assert number_problems(PACKAGE) == []
    name, many = "actoffload.planning.constants", "".join(f'N{n} = {n}\n"""Seen."""\n' for n in range(MAX_TUNED + 1))
    found = {
        "N = 3\n": "no source",
        many: f"{MAX_TUNED + 1} numbers",
        'TWO: tuple[float, ...] = (0.5, 1 << 4)\nx = "a"\n': "no source",
    }
    for text, problem in found.items():
        assert problem in str(number_problems({name: text})), text
    assert "belongs" in str(number_problems({"actoffload.autotune.shapes": 'N = 3\n"""Seen."""\n'}))


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    files = [*ROOT.glob("actoffload/**/__init__.py"), *ROOT.glob("integrations/**/__init__.py")]
    folders = {".".join(file.relative_to(ROOT).parent.parts) for file in files}
    assert {name.replace("actoffload.integrations", "integrations") for name in settings["packages"]} == folders
