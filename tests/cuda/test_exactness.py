"""Whether results depend on how many tokens run together: decided without a GPU, from the modules and by a trial."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from replays import replay_captures
from tiny_models import PROMPTS, tiny_model
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

import depthdecay as dd
from depthdecay.cuda import exactness
from depthdecay.cuda.compiled_layers import CompiledLayers
from depthdecay.cuda.exactness import why_inexact
from depthdecay.cuda.pass_graphs import PassGraphs
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs
from depthdecay.runners.contract import Part

LAYERS = 3
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "vocab_size": 128,
}


def stack_of(architecture: str = "llama", dtype: torch.dtype = torch.bfloat16, **more: Any) -> LayerStack:
    return LayerStack.of(tiny_model(architecture, **{**SHAPE, **more}).to(dtype))


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"dtype": torch.float32}),
        ("llama", {"intermediate_size": 320, "vocab_size": 97}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),
        ("gpt_neox", {}),
        ("gemma2", {"head_dim": 256, "attn_implementation": "eager"}),
        ("gemma3_text", {"head_dim": 64, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
        ("mistral", {"sliding_window": 7}),
        ("mixtral", {}),
    ],
)
def test_models_of_plain_matrices_are_exact(architecture: str, more: dict[str, Any]) -> None:
    assert why_inexact(stack_of(architecture, **more)) is None


@pytest.mark.parametrize(
    ("architecture", "more", "reason"),
    [
        ("llama", {"dtype": torch.float64}, "float64 products"),
        ("llama", {"num_attention_heads": 8}, "head sizes 64, 128, 256, not 32"),
        ("llama", {"attn_implementation": "eager"}, "attention implementation is 'eager'"),
        ("llama", {"intermediate_size": 300}, "256 x 300 does not divide"),
        ("mixtral", {"intermediate_size": 272}, "MixtralExperts multiplies by matrices our kernels do not support"),
        ("gpt2", {"n_embd": 256, "n_layer": LAYERS, "hidden_size": None, "num_hidden_layers": None}, "Conv1D"),
    ],
)
def test_what_our_kernels_do_not_fit_is_named(architecture: str, more: dict[str, Any], reason: str) -> None:
    if architecture == "gpt2":
        more = {**more, "intermediate_size": None, "num_attention_heads": None}
    assert reason in str(why_inexact(stack_of(architecture, **more)))


def test_a_cap_that_torch_s_attention_leaves_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # as in transformers 5.17
    stack = stack_of("gemma2", head_dim=64)
    assert stack.takes_whole_masks
    assert "load it with attn_implementation='eager'" in str(why_inexact(stack))


def passes_of(stack: LayerStack, compiled: CompiledLayers | None, batch: int = 1) -> PassGraphs:
    return PassGraphs(stack, dd.Plan.full(LAYERS), Repairs(), compiled, batch=batch, rooms=[128] * LAYERS)


def test_only_compiled_passes_of_one_text_are_exact() -> None:
    stack = stack_of()
    assert passes_of(stack, CompiledLayers()).inexact is None
    assert "several texts" in str(passes_of(stack, CompiledLayers(), batch=2).inexact)
    assert "not compiled" in str(passes_of(stack, None).inexact)


@pytest.mark.parametrize("same", [True, False])
def test_a_trial_decides_and_leaves_no_trace(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stub for passes whose logits are either the same at every width or not."""
    compiled = CompiledLayers()
    passes = passes_of(stack_of(), compiled)
    passes.run([Part(0, 0, PROMPTS[0], LAYERS, passes.plan)])
    before = [layer.keys.clone() for layer in passes.cache.planned if layer.keys is not None]
    widths: list[int] = []

    def several(ids: torch.Tensor, positions: torch.Tensor, bucket: int) -> torch.Tensor:
        widths.append(ids.shape[1])
        for layer in passes.cache.planned:
            assert layer.keys is not None
            layer.keys[positions] = 5.0
        said = ids.unsqueeze(-1).float() + positions.unsqueeze(-1)
        return said if same else said + ids.shape[1] / 1024

    monkeypatch.setattr(passes, "several", several)
    with torch.no_grad():
        passes._try_bits()
        passes._try_bits()  # runs only once
    assert widths == [16, 1, 2, 4, 8, 1]
    assert (passes.inexact is None) == same
    assert passes_of(passes.stack, compiled).inexact == passes.inexact  # all passes of an engine share one verdict
    after = [layer.keys for layer in passes.cache.planned]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True) if new is not None)


class Watched(CompiledLayers):
    """Uncompiled layers that record how many tokens each kind of pass ran with."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[tuple[str, int]] = set()

    def layer(self, stack: LayerStack, index: int, rows: str, args: Any, kwargs: Any) -> Any:
        self.asked.add((rows, args[0].shape[1]))
        return type(stack.layers[index]).forward(stack.layers[index], *args, **kwargs)

    def carrying_layer(self, stack: LayerStack, index: int, carried: Any, args: Any, kwargs: Any) -> Any:
        return self.layer(stack, index, "few", args, kwargs)

    def function(self, plain: Any, dynamic: bool | None = None, rows: str = "one") -> Any:
        return plain


@pytest.mark.parametrize("reason", [None, "switched off for this test"])
def test_steps_and_verifications_run_alike_only_where_that_gives_the_same_bits(
    reason: str | None, windows: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_captures(monkeypatch)
    monkeypatch.setattr(exactness, "why_inexact", lambda stack: reason)
    monkeypatch.setattr(exactness.Exactness, "tell", lambda self, same_bits: setattr(self, "tried", True))
    model = tiny_model(**SHAPE)  # in float32, where rounding changes no token
    engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[1]), fast=False)
    expected = engine.generate(PROMPTS[:1], 30, mode="full")[0]
    assert expected.exact is None  # nothing is promised on a CPU
    engine.uses_graphs, engine.compiled = True, Watched()
    full = engine.generate(PROMPTS[:1], 30, mode="full")[0]
    steps = engine.compiled.asked - {("few", 4), ("few", 8), ("few", 16)}  # from the trial
    assert steps == ({("few", 2)} if reason is None else {("one", 1)})
    engine.compiled.asked.clear()
    lossless = engine.generate(PROMPTS[:1], 30, mode="lossless")[0]
    assert ("one", 1) in engine.compiled.asked  # drafts
    assert all(tokens > 1 for rows, tokens in engine.compiled.asked if rows == "few")
    for result in (full, lossless):
        assert result.token_ids == expected.token_ids
        assert (result.exact, result.inexact_because) == (reason is None, reason)
    assert lossless.drafted > 0


def test_a_lossless_answer_in_16_bits_that_is_not_exact_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_captures(monkeypatch)
    engine = dd.Engine(tiny_model(**SHAPE).to(torch.bfloat16), fast=False)
    engine.uses_graphs = True
    with pytest.warns(UserWarning, match="may differ from full depth at near-ties: layers are not compiled"):
        first = engine.generate(PROMPTS[:1], 4, mode="lossless")[0]
    with warnings.catch_warnings(action="error"):
        second = engine.generate(PROMPTS[:1], 4, mode="lossless")[0]
    assert first.exact is second.exact is False
