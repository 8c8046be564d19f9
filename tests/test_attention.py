"""Our attention for steps of batches against transformers' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, LAYERS, PROMPTS, tiny_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

import depthdecay as dd
from depthdecay import attention


def states(heads: int, groups: int, positions: int = 19, batch: int = 3, dim: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn((batch, heads, 1, dim), generator=generator)
    # As our cache hands them out: views of (position, batch, group, dim).
    key, value = (torch.randn((positions, batch, groups, dim), generator=generator).permute(1, 2, 0, 3) for _ in "kv")
    return query, key, value


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (12, 2), (6, 6), (8, 1)])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "wide"])
def test_it_equals_transformers(heads: int, groups: int, kind: str) -> None:
    query, key, value = states(heads, groups)
    mask: Any = None
    if kind != "none":
        mask = torch.rand((3, 1, 1, 19), generator=torch.Generator().manual_seed(1)) > 0.4
        mask[..., 0] = True
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    if kind == "wide":
        mask = mask[:1]
    module = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    given = attention.grouped_attention(query, key, value, mask, 0.3)
    torch.testing.assert_close(given, expected)


def test_keys_are_not_copied() -> None:
    _, key, _ = states(12, 2)
    assert key.reshape(6, 19, 8).data_ptr() == key.data_ptr()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_engines_say_the_same_with_it(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_model(architecture), dd.Plan.decay(LAYERS, 0.95)
    expected = [r.token_ids for r in dd.Engine(model, plan=plan, fast=False).generate(PROMPTS, 16, eos_token_id=None)]
    taken: list[int] = []
    original = attention.grouped_attention

    def counted(*args: Any) -> torch.Tensor:
        taken.append(1)
        return original(*args)

    monkeypatch.setattr(attention, "grouped_attention", counted)
    before = AttentionInterface._global_mapping["sdpa"]
    with attention.grouped_steps(model.config):
        given = [r.token_ids for r in dd.Engine(model, plan=plan, fast=False).generate(PROMPTS, 16, eos_token_id=None)]
    assert given == expected
    assert AttentionInterface._global_mapping["sdpa"] is before
    config = model.config
    grouped = getattr(config, "num_key_value_heads", None) not in (None, config.num_attention_heads)
    capped = getattr(config, "attn_logit_softcapping", None) is not None  # left to transformers
    assert bool(taken) == (grouped and config._attn_implementation == "sdpa" and not capped)
