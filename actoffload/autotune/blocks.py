"""The repeated blocks of a model."""

from __future__ import annotations

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by qualified name: the members of each outermost container of equals.

    A container of equals is a ``ModuleList``, ``ModuleDict`` or ``Sequential`` with two or more members of one class
    that have parameters: the layers of a transformer, with encoder and decoder apart.

    >>> sorted(find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    ['0', '1']
    """
    found: dict[str, nn.Module] = {}
    _collect(model, "", found)
    return found


def _collect(module: nn.Module, prefix: str, found: dict[str, nn.Module]) -> None:
    children = dict(module.named_children())
    kinds = {type(child) for child in children.values()}
    equals = isinstance(module, _CONTAINERS) and len(children) > 1 and len(kinds) == 1
    if equals and all(any(True for _ in child.parameters()) for child in children.values()):
        found.update({f"{prefix}{name}": child for name, child in children.items()})
        return
    for name, child in children.items():
        _collect(child, f"{prefix}{name}.", found)
