"""The small GPT of the demo and the benchmarks."""

from __future__ import annotations

import pytest
import torch

from actoffload.testing.gpt import GPT, GPTConfig

SMALL = GPTConfig(layers=2, width=32, seq=16, head_width=16)


def _model(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def test_a_position_sees_nothing_after_it() -> None:
    model = _model(SMALL)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 0
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_recompute_has_the_same_gradients() -> None:
    tokens = torch.randint(0, 256, (2, 17))
    gradients = []
    for recompute in (False, True):
        config = GPTConfig(layers=2, width=32, seq=16, head_width=16, dropout=0.1, recompute=recompute)
        model = _model(config)
        torch.manual_seed(1)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 100}, "width=100: must be a multiple of head_width=64"),
        ({"layers": 0}, "layers=0"),
        ({"seq": -1}, "seq"),
    ],
)
def test_bad_sizes(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**sizes)  # type: ignore[arg-type]
