"""Policies and module patterns: facts in, decisions out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from actoffload.planner import Plan
from actoffload.policy import Decision, KeepReason, ModuleFilter, Policy, TensorFacts
from actoffload.summary import KEPT_MEANINGS


def facts(**changes: Any) -> TensorFacts:
    values: dict[str, Any] = {
        "nbytes": 1024,
        "shape": (16, 16),
        "dtype": "float32",
        "device": "cpu",
        "module": None,
        "index": 0,
    }
    return TensorFacts(**(values | changes))


def test_facts_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts().nbytes = 1  # type: ignore[misc]


def test_anything_that_decides_is_a_policy() -> None:
    class Mine:
        def decide(self, facts: TensorFacts) -> Decision:
            return Decision.KEEP

    assert isinstance(Mine(), Policy)
    assert isinstance(Plan(()), Policy)
    assert not isinstance(object(), Policy)


@pytest.mark.parametrize(
    ("include", "exclude", "module", "allowed"),
    [
        ((), (), None, True),
        ((), (), "layers.0", True),
        (("layers.*",), (), "layers.0", True),
        (("layers.*",), (), "layers.0.attention.query", True),
        (("layers.0",), (), "layers.0.attention", True),
        (("layers.0",), (), "layers.01", False),
        (("layers.0",), (), "layers", False),
        (("layers.*",), (), "head", False),
        (("layers.*",), (), None, False),
        ((), ("head",), "head", False),
        ((), ("head",), "head.linear", False),
        ((), ("head",), "header", True),
        ((), ("head",), None, True),
        ((), ("*.attention",), "layers.3.attention.query", False),
        (("layers.*",), ("layers.3",), "layers.3.mlp", False),
        (("layers.*",), ("layers.3",), "layers.4.mlp", True),
        (("layers.[01]",), (), "layers.1", True),
        (("layers.[01]",), (), "layers.2", False),
        (("a", "b"), (), "b.c", True),
        (("*",), ("*",), "a", False),
        (("LAYERS.*",), (), "layers.0", False),
    ],
)
def test_module_patterns(include: tuple[str, ...], exclude: tuple[str, ...], module: str | None, allowed: bool) -> None:
    assert ModuleFilter(include, exclude).allows(module) is allowed


def test_every_reason_to_keep_has_a_meaning_for_a_person() -> None:
    assert {reason.value for reason in KeepReason} == set(KEPT_MEANINGS)
