"""Our attention while decoding against transformers' own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from depthdecay.cuda.kernels import split_attention as attend


def states(heads: int, groups: int, positions: int = 19, batch: int = 3, dim: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn((batch, heads, 1, dim), generator=generator)
    # As our cache hands them out: views of (position, batch, group, dim).
    key, value = (torch.randn((positions, batch, groups, dim), generator=generator).permute(1, 2, 0, 3) for _ in "kv")
    return query, key, value


@pytest.mark.parametrize(("heads", "groups", "tokens"), [(4, 2, 1), (12, 2, 5), (6, 6, 16), (8, 1, 3)])
def test_a_few_tokens_are_attended_as_by_transformers(heads: int, groups: int, tokens: int) -> None:
    _, key, value = states(heads, groups, batch=2)
    query = torch.randn((2, tokens, heads, 8), generator=torch.Generator().manual_seed(2)).transpose(1, 2)
    mask = torch.rand((2, 1, tokens, 24), generator=torch.Generator().manual_seed(1)) > 0.4  # wider than the cache
    mask[..., 0] = True
    module = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask[..., :19], scaling=0.3)
    torch.testing.assert_close(attend.attend(query, key, value, mask, 0.3, False), expected)


def test_only_what_the_kernels_can_do_is_given_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "triton", object())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    query, key, value = (state.to(torch.bfloat16) for state in states(4, 2, batch=1, dim=64))
    mask = torch.ones((1, 1, 1, 24), dtype=torch.bool)
    assert attend.can_attend(query, key, value, mask)
    assert not attend.can_attend(query, key, value, None)
    assert not attend.can_attend(query, key, value, mask[..., :18])
    assert not attend.can_attend(query, key, value, mask.float())
    assert not attend.can_attend(query.float(), key.float(), value.float(), mask)
    assert not attend.can_attend(query.expand(1, 4, 17, 64), key, value, mask)
    assert not attend.can_attend(*(state[..., :32] for state in (query, key, value)), mask)
