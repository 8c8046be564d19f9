"""The greedy choice after a pass: what torch's argmax says, and where a step goes on."""

from __future__ import annotations

import pytest
import torch

from depthdecay.cuda.likeliest import PIECES, likeliest, take_step


@pytest.mark.parametrize("size", [PIECES * 37, 29 * 13, 100, 97, 1])
@pytest.mark.parametrize("shape", [(1,), (5,), (1, 7)])
def test_the_likeliest_token_is_the_argmax(size: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(size)
    logits = torch.randn(*shape, size).bfloat16()
    assert torch.equal(likeliest(logits), logits.argmax(-1))


def test_of_equal_logits_the_first_wins() -> None:
    logits = torch.zeros(3, PIECES * 4)
    logits[0, [90, 91, 200]] = 1.0
    logits[1, [255, 7]] = 2.0
    assert likeliest(logits).tolist() == [90, 7, 0]


def test_a_step_feeds_its_choices_back_and_goes_on() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 1.0]])
    kept, tokens = torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.long)
    position, position_ids = torch.tensor([4]), torch.tensor([[4], [2]])
    latest, turn = torch.full((3, 2), 9), torch.tensor([1])
    take_step(logits, kept, tokens, position, position_ids, latest, turn)
    assert torch.equal(kept, logits)
    assert tokens.tolist() == [[1], [0]]
    assert (position.tolist(), position_ids.tolist()) == ([5], [[5], [3]])
    assert (latest.tolist(), turn.tolist()) == ([[9, 9], [1, 0], [9, 9]], [2])
    take_step(logits.flip(0), kept, tokens, position, position_ids, latest, turn)
    assert (latest.tolist(), turn.tolist()) == ([[9, 9], [1, 0], [0, 1]], [0])


def test_it_can_be_compiled_as_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(likeliest, fullgraph=True)
    for size in (29 * 13, PIECES * 4):
        logits = torch.randn(3, size)
        assert torch.equal(compiled(logits), logits.argmax(-1))
