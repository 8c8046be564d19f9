"""Runs the kernels for a few rows without a GPU, in Triton's interpreter: `TRITON_INTERPRET=1 python` this file."""

from __future__ import annotations

import torch
import triton_interpreter  # noqa: F401

from depthdecay.cuda.kernels import expert_products, gated_product, gemv, host_copy, keyed_pick
from depthdecay.cuda.kernels.keyed_pick import Rules, Seen


def check_products(dtype: torch.dtype, columns: int, heights: list[int]) -> None:
    weights = [(torch.randn(height, columns) * 0.1).to(dtype) for height in heights]
    x = torch.randn(70, columns).to(dtype)
    expected = gemv.multiply(x, weights, False)
    whole = torch.cat([x.double() @ weight.double().T for weight in weights], dim=1)
    assert float((expected.sum(0).double() - whole).norm() / whole.norm()) < 1e-6
    for first, count in ((0, 1), (3, 2), (5, 16), (7, 17), (1, 33), (2, 64), (0, 65)):
        some = gemv.multiply(x[first : first + count].contiguous(), weights, False)
        assert torch.equal(some, expected[:, first : first + count]), (dtype, columns, heights, first, count)


def check_gated(rows: int, columns: int) -> None:
    gate, up = ((torch.randn(rows, columns) * 0.1).half() for _ in "ab")
    x = torch.randn(16, columns).half()
    expected = gated_product.multiply_gated(x, gate, up, False)
    first, second = (x.double() @ weight.double().T for weight in (gate, up))
    whole = first / (1 + torch.exp(-first)) * second
    assert float((expected.double() - whole).norm() / whole.norm()) < 1e-3
    for begin, count in ((0, 1), (3, 2), (5, 7)):
        some = gated_product.multiply_gated(x[begin : begin + count].contiguous(), gate, up, False)
        assert torch.equal(some, expected[begin : begin + count]), (rows, columns, begin, count)


def check_experts(dtype: torch.dtype, experts: int, choices: int, each: bool) -> None:
    weights = (torch.randn(experts, 64, 512) * 0.1).to(dtype)
    chosen = torch.stack([torch.randperm(experts)[:choices] for _ in range(20)])
    x = torch.randn(20 * choices if each else 20, 512).to(dtype)
    expected = expert_products.multiply_by_experts(x, chosen, weights, each, False)
    vectors = x if each else x.repeat_interleave(choices, dim=0)
    whole = torch.bmm(weights[chosen.flatten()].double(), vectors.double().unsqueeze(-1)).squeeze(-1)
    assert float((expected.sum(0).double() - whole).norm() / whole.norm()) < 1e-6
    for first, count in ((0, 1), (3, 2), (1, 16), (2, 17)):
        tokens, pairs = slice(first, first + count), slice(first * choices, (first + count) * choices)
        vectors = x[pairs if each else tokens]
        some = expert_products.multiply_by_experts(vectors, chosen[tokens], weights, each, False)
        assert torch.equal(some, expected[:, pairs]), (dtype, experts, choices, each, first, count)


def check_picks(count: int, rules: Rules, spread: float = 2.0, rows: int = 12) -> None:
    """Every row of the kernels draws what the plain form draws, alone and in company; ties are frequent."""
    logits = (spread * torch.randn(rows, count)).bfloat16().float()
    keys, named = torch.randint(2**32, (rows,)), torch.randperm(count) * 3 + 1
    has, window = torch.rand(1, 3 * count + 1) < 0.5, torch.randint(3 * count, (7,))
    several = Seen(torch.rand(rows, 3 * count + 1) < 0.5)
    for tokens in (None, named):
        for seen in (None, several, Seen(has, window, torch.randint(7, (rows,)))):
            expected = keyed_pick.plainly(logits, keys, tokens, seen, rules)
            assert torch.equal(keyed_pick.launched(logits, keys, tokens, seen, rules), expected), (count, rules)
    for row in range(0, rows, 5):
        alone = keyed_pick.launched(logits[row : row + 1], keys[row : row + 1], None, None, rules)
        assert torch.equal(alone, keyed_pick.plainly(logits, keys, None, None, rules)[row : row + 1])


def check_ties() -> None:
    """More equal scores than there is room for are left out, unless nothing is above them."""
    logits = torch.zeros(1, 9000)
    for highest, allowed in (([], range(9000)), ([17, 8000, 8001], [17, 8000, 8001])):
        logits[0, highest] = 1.0
        drawn = {int(keyed_pick.launched(logits, torch.tensor([key]), None, None, Rules(top_k=9))) for key in range(40)}
        assert drawn <= set(allowed)
        assert len(drawn) > 2
    for value in (float("nan"), float("inf"), -float("inf")):
        for rules in (Rules(top_k=9, top_p=0.5), Rules()):
            logits[0, 5] = value
            assert 0 <= int(keyed_pick.launched(logits, torch.tensor([1]), None, None, rules)) < 9000
    logits[:] = -float("inf")
    assert 0 <= int(keyed_pick.launched(logits, torch.tensor([1]), None, None, Rules(top_k=9))) < 9000


def check_copies() -> None:
    """All numbers arrive, and nothing behind them changes."""
    for dtype in (torch.long, torch.float32):
        for rows, columns in ((1, 1), (4, 9), (8, 64)):
            source = torch.randn(rows, columns).mul(1000).to(dtype)
            held = torch.zeros(rows * columns + 1, dtype=dtype)
            host_copy.launched(source, held[:-1].view(rows, columns), False)
            assert torch.equal(held, torch.cat([source.flatten(), held.new_zeros(1)]))


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype in (torch.float16, torch.float32):  # the interpreter does not support bfloat16
        for columns, heights in ((512, [64, 32]), (576, [96]), (256, [8]), (128, [97]), (128, [5632])):
            check_products(dtype, columns, heights)
        for experts, choices in ((4, 2), (6, 3)):
            for each in (False, True):
                check_experts(dtype, experts, choices, each)
    for count in (9, 97, 1024, 5000):
        check_picks(count, Rules(0.7, 1.3, 20, 0.8))
        check_picks(count, Rules(penalty=1.1, top_k=1))
    check_picks(70_000, Rules(1.3, 1.2, 50, 0.9, 0.02), 3.0, 3)
    check_picks(9000, Rules(top_k=190, top_p=0.95, min_p=0.01), 0.5)
    for count in (97, 5000):
        check_picks(count, Rules(0.7, 1.3))
    check_ties()
    check_copies()
    check_gated(132 * 32, 128)
    check_gated(216 * 64, 64)
    print("alike")
