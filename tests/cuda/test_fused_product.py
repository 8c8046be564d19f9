"""Products with what stands around them in a layer, without a GPU: found where it is, and the same answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import fx, nn
from torch.nn import functional

from depthdecay.cuda import gemv_pass
from depthdecay.cuda.compiled_layers import inductor_options
from depthdecay.cuda.kernels import fused_product

QKV, OUTPUT, GATED, DOWN = ("norm", 3), ("residual", 1), ("norm gate", 2), ("residual", 1)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What each fused product took along, and how many matrices it multiplied by."""
    found: list[tuple[str, int]] = []
    plain = gemv_pass.GemvPass.__call__

    def note(self: Any, graph: fx.Graph) -> None:
        plain(self, graph)
        graph.lint()
        for node in graph.nodes:
            if node.target is torch.ops.depthdecay.fused_product.default:
                _, weights, norm, _, residual, gated, _, _ = node.args
                kinds = {"norm": norm is not None, "gate": gated, "residual": residual is not None}
                found.append((" ".join(kind for kind, there in kinds.items() if there), len(weights)))

    monkeypatch.setattr(gemv_pass.GemvPass, "__call__", note)
    return found


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, options=inductor_options("few"))


def run_both(function: Callable[..., Any], *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        return compiled(function)(*args), function(*args)


@pytest.mark.parametrize(
    ("architecture", "more", "expected"),
    [
        ("llama", {}, [QKV, OUTPUT, GATED, DOWN]),
        ("qwen2", {}, [QKV, OUTPUT, GATED, DOWN]),  # with biases of query, key and value
        ("qwen3", {"head_dim": 64}, [QKV, OUTPUT, GATED, DOWN]),
        ("llama", {"hidden_act": "gelu"}, [QKV, OUTPUT, ("norm", 2), DOWN]),
        ("llama", {"attention_bias": True}, [QKV, GATED, DOWN]),  # a bias stands between the output and the residual
        ("mixtral", {}, [QKV, OUTPUT]),  # the norm before a router serves the experts too
        ("gpt_neox", {}, []),
    ],
)
def test_a_layer_s_products_take_along_what_stands_around_them(
    architecture: str, more: dict[str, Any], expected: list[tuple[str, int]], fused: list[tuple[str, int]]
) -> None:
    model = tiny_model(architecture, hidden_size=256, intermediate_size=384, num_attention_heads=4, **more)
    model = model.to(torch.bfloat16)
    if architecture == "gpt_neox":
        layer, rotary = model.gpt_neox.layers[0], model.gpt_neox.rotary_emb
    else:
        layer, rotary = model.model.layers[0], model.model.rotary_emb
    torch.manual_seed(0)
    hidden = torch.randn(1, 5, 256).bfloat16()
    places = rotary(hidden, torch.arange(5).unsqueeze(0))

    def run(hidden: torch.Tensor) -> torch.Tensor:
        said = layer(hidden, attention_mask=None, position_embeddings=places)
        return said[0] if isinstance(said, tuple) else said

    got, plain = run_both(run, hidden)
    assert float((got.float() - plain.float()).norm() / plain.float().norm()) < 0.02
    assert fused == expected


def test_what_others_look_at_is_not_taken_along(fused: list[tuple[str, int]]) -> None:
    torch.manual_seed(0)
    gate, up, down = (nn.Linear(256, 256, bias=False).bfloat16() for _ in range(3))
    norm = nn.RMSNorm(256).bfloat16()

    def both(x: torch.Tensor) -> torch.Tensor:
        opened = functional.silu(gate(x))
        return opened * up(x) + opened

    def normed(x: torch.Tensor) -> torch.Tensor:
        inner = norm(x)
        return down(inner) * inner

    def broadcast(x: torch.Tensor) -> torch.Tensor:
        return down(x) + x[:, :1]

    for function in (both, normed, broadcast):
        got, plain = run_both(function, torch.randn(1, 5, 256).bfloat16())
        assert torch.allclose(got.float(), plain.float(), atol=0.05)
    assert fused == []


@pytest.mark.parametrize("turned", [False, True])
def test_a_gate_is_found_however_torch_writes_it(turned: bool, fused: list[tuple[str, int]]) -> None:
    """Versions of torch take SiLU apart in two ways; factors may come in either order."""
    torch.manual_seed(0)
    gate, up = (nn.Linear(256, 256, bias=False).bfloat16() for _ in range(2))

    def spelled(x: torch.Tensor) -> torch.Tensor:
        value = gate(x).float()
        opened = (value.sigmoid() * value if turned else value * value.sigmoid()).bfloat16()
        return up(x) * opened if turned else opened * up(x)

    got, plain = run_both(spelled, torch.randn(1, 5, 256).bfloat16())
    assert torch.allclose(got.float(), plain.float(), atol=0.05)
    assert fused == [("gate", 2)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_fused_product_without_a_gpu_is_the_plain_one(gated: bool, with_norm: bool, with_residual: bool) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(3, 256), [torch.randn(64, 256) / 16, torch.randn(64, 256) / 16]
    norm = torch.rand(256) if with_norm else None
    residual = torch.randn(3, 64 if gated else 128) if with_residual else None
    vectors = x if norm is None else functional.rms_norm(x, (256,), norm, 1e-5)
    first, second = (vectors @ weight.t() for weight in weights)
    expected = functional.silu(first) * second if gated else torch.cat([first, second], dim=1)
    if residual is not None:
        expected = expected + residual
    args = (x, weights, norm, 1e-5, residual, gated, weights, False)
    assert torch.allclose(fused_product.fused_product(*args), expected, atol=1e-4)
    torch.library.opcheck(fused_product.fused_product, args)


@pytest.mark.parametrize("shape", [(1536, 1536), (8960, 1536), (4096, 4096), (96, 64), (4096, 11008), (32, 128)])
def test_what_is_fetched_ahead_lies_within_the_matrix(shape: tuple[int, int]) -> None:
    matrix = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    for lanes in (128, 16384, 49152):
        _, pieces, stride, size = fused_product._fetched(matrix, lanes)
        assert size % 16 == 0
        assert 0 < 2 * (pieces - 1) * stride + size <= 2 * matrix.numel()
        if 2 * matrix.numel() <= fused_product.LATER_BYTES:
            assert pieces <= lanes
            assert pieces * size > 0.99 * 2 * matrix.numel()
