"""The names that users and integrations rely on, and the error tree: one root, and a builtin parent for each leaf."""

from __future__ import annotations

import inspect
import subprocess
import sys

import actoffload
from actoffload import Plan, errors
from actoffload.policy import Decision, Policy, TensorFacts

NAMES = (
    "Attachment Decision OffloadConfig Offloader Plan Policy Profile Statistics StorageEngine TensorFacts __version__ "
    "attach checkpoint create_selective_checkpoint_contexts errors keep name no_offload offload_activations schedules"
)


def test_the_public_names() -> None:
    assert sorted(actoffload.__all__) == NAMES.split()


def test_every_public_name_is_there_and_documented() -> None:
    for name in actoffload.__all__:
        value = getattr(actoffload, name)
        if name != "__version__":
            assert value.__doc__, f"{name} has no docstring"


def _classes() -> list[type[BaseException]]:
    found = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    return [c for c in found if issubclass(c, BaseException) and c.__module__ == errors.__name__]


def test_every_error_is_public_documented_and_has_our_root() -> None:
    assert errors.__doc__ is not None
    for cls in _classes():
        assert issubclass(cls, errors.ActOffloadError)
        assert cls.__name__ in errors.__doc__, f"{cls.__name__} is missing from the tree at the top of errors.py"
    builtins = {
        ValueError: "ConfigError SpoolPathError EngineUnavailableError",
        RuntimeError: "OffloaderClosedError NothingOffloadedError SavedTensorModifiedError StateError",
        OSError: "SpoolPathError SpoolFullError StorageWriteError StorageReadError EngineUnavailableError",
    }
    for builtin, names in builtins.items():
        assert all(issubclass(getattr(errors, name), builtin) for name in names.split()), builtin


def test_errors_keep_their_arguments() -> None:
    error = errors.ConfigError("target", "tape", "choose one of 'host', 'nvme'")
    assert str(error) == "target='tape': choose one of 'host', 'nvme'"
    assert (error.field, error.value) == ("target", "tape")
    assert errors.StorageWriteError(28, "No space left on device").errno == 28
    assert issubclass(errors.ChecksumError, errors.StorageReadError)


def test_a_policy_is_any_object_with_decide() -> None:
    class Mine:
        def decide(self, facts: TensorFacts) -> Decision:
            return Decision.KEEP

    assert isinstance(Mine(), Policy)
    assert isinstance(Plan(()), Policy)
    assert not isinstance(object(), Policy)


def test_the_first_name_imports_torch_and_nothing_else_that_is_heavy() -> None:
    """The compiler alone (``torch._dynamo``) takes seconds to import."""
    heavy = "torch._dynamo torch._inductor sympy rich typer matplotlib numpy.testing"
    heavy += " transformers accelerate trl peft deepspeed megatron lightning torchtitan diffusers"
    program = (
        "import pickle, sys; import actoffload; actoffload.errors.ConfigError; actoffload.__version__; "
        "late, new = not hasattr(actoffload, '__wrapped__'), set(sys.modules); import torch; "
        "before = set(sys.modules); "
        "from actoffload import attach; actoffload.planning.profile; "
        "listed = set(actoffload.__all__) <= set(dir(actoffload)); "
        "same = pickle.loads(pickle.dumps(actoffload.Statistics)) is actoffload.Statistics; "
        "model = torch.nn.Linear(2, 2); attach(model, target='host', announce='none'); "
        "model(torch.ones(1, 2)).sum().backward(); new |= set(sys.modules) - before; "
        f"print(late, listed, same, hasattr(actoffload, 'no_such_name'), new & set({heavy!r}.split() + ['torch']))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "True True True False set()\n"
