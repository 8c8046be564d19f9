"""Our decode attention, compared with transformers' own."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from depthdecay.cuda.decode_attention import spans_of
from depthdecay.cuda.kernels import split_attention as attend


def states(heads: int, groups: int, positions: int = 19, batch: int = 3, dim: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn((batch, heads, 1, dim), generator=generator)
    # As our cache returns them: views of (position, batch, group, dim).
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
    torch.testing.assert_close(attend.attend(query, key, value, mask, 0.3, None, None, False), expected)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_spans_stand_for_the_masks_of_padded_texts(window: int | None, softcap: float | None) -> None:
    """Compared with Gemma 2's own eager attention over explicit masks."""
    query, key, value = states(6, 2)
    query = query.repeat(1, 1, 3, 1) * torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    first, columns = torch.tensor([0, 4, 11]), torch.tensor([13, 14, 15])
    mask = torch.full((3, 1, 3, 19), float("-inf"))
    for row, token in itertools.product(range(3), range(3)):
        last = int(columns[token])
        seen = [place for place in range(int(first[row]), last + 1) if window is None or place > last - window]
        mask[row, 0, token, seen] = 0.0
    module = SimpleNamespace(num_key_value_groups=3, training=False)
    expected, _ = eager_attention_forward(module, query, key, value, mask, scaling=0.3, softcap=softcap)
    spans = spans_of(first, columns)
    torch.testing.assert_close(attend.attend(query, key, value, spans, 0.3, window, softcap, False), expected)
    assert torch.equal(attend.mask_of(spans, 19, window), mask == 0)


def test_chunks_follow_each_other_and_get_longer() -> None:
    """Up to 40 000 positions: the chunks cover them, and each position is in exactly one."""
    lengths = [attend.SPLIT << min(chunk // attend.LEVEL, attend.MOST_DOUBLINGS) for chunk in range(200)]
    ends = list(itertools.accumulate(lengths))
    for positions in (1, 63, 64, 65, 2047, 2048, 2049, 6143, 6144, 6145, 14336, 14337, 32768, 40000):
        assert attend.chunks_for(positions) == next(chunk for chunk, end in enumerate(ends) if end >= positions) + 1
    tiles = [attend.tiling(dim, itemsize)["TILE"] for dim in (16, 64, 128, 256) for itemsize in (2, 4)]
    assert all(length % tile == 0 for length in lengths for tile in tiles)


def test_only_what_the_kernels_can_do_is_given_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "triton", object())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    query, key, value = (state.to(torch.bfloat16) for state in states(4, 2, batch=1, dim=64))
    mask = torch.ones((1, 1, 1, 24), dtype=torch.bool)
    assert attend.can_attend(query, key, value, mask)
    assert not attend.can_attend(query, key, value, None)
    assert not attend.can_attend(query, key, value, mask[..., :18])
    assert not attend.can_attend(query, key, value, mask.float())
    assert attend.can_attend(query, key, value, torch.tensor([[[[0, 18]]]]))
    assert attend.can_attend(query.float(), key.float(), value.float(), mask)
    assert not attend.can_attend(query.double(), key.double(), value.double(), mask)
    assert not attend.can_attend(query.expand(1, 4, 17, 64), key, value, mask)
    assert not attend.can_attend(*(state[..., :32] for state in (query, key, value)), mask)
