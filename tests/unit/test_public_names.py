"""The names that users and integrations rely on."""

from __future__ import annotations

import actoffload


def test_the_public_names() -> None:
    assert sorted(actoffload.__all__) == sorted(
        [
            "Attachment",
            "Decision",
            "OffloadConfig",
            "Offloader",
            "Plan",
            "Policy",
            "Profile",
            "Statistics",
            "StorageEngine",
            "TensorFacts",
            "__version__",
            "attach",
            "create_selective_checkpoint_contexts",
            "errors",
            "keep",
            "no_offload",
            "offload_activations",
        ]
    )


def test_every_public_name_is_there_and_documented() -> None:
    for name in actoffload.__all__:
        value = getattr(actoffload, name)
        if name != "__version__":
            assert value.__doc__, f"{name} has no docstring"
