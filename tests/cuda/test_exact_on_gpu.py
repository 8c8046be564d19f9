"""Results on a GPU are bitwise independent of how many tokens run together: kernels, passes and whole answers."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import random_head
from tiny_models import PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.cuda.compiled_layers import CompiledLayers
from depthdecay.cuda.decode_attention import spans_of
from depthdecay.cuda.kernels import expert_products as experts
from depthdecay.cuda.kernels import gated_product, gemv
from depthdecay.cuda.kernels import split_attention as attend
from depthdecay.cuda.kernels.paged_attention import Paged, attend_paged
from depthdecay.cuda.width_trial import WidthTrial
from depthdecay.model.layers import LayerStack
from depthdecay.self_check import check_model
from depthdecay.speculative.expected_gain import LEARNED, TrackRecord

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

LAYERS = 4
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
}
GATED_ROWS = 132 * 32  # enough for the kernel of gated products
WINDOW = 100  # shorter than the texts
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False, "intermediate_size": GATED_ROWS},
    "qwen3": {"head_dim": 128},
    "gpt_neox": {"num_key_value_heads": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
EXACT: dict[str, dict[str, Any]] = PLAIN | {
    # A softcap, and sliding windows in every second layer.
    "gemma2": {"head_dim": 256, "sliding_window": WINDOW, "attn_implementation": "eager"},
    "gemma3_text": {
        "head_dim": 128,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    },
    "mistral": {"sliding_window": WINDOW},
}
INEXACT: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({"intermediate_size": 1000}, "512 x 1000 does not divide"),
    "gemma2": ({"head_dim": 32, "attn_implementation": "eager"}, "head sizes 64, 128, 256, not 32"),
}
# Launches per pass: query with key and value, output, gate with up, down; the LM head. With experts, the router's. Gate
# with up may have a kernel of its own.
PRODUCTS = {"mixtral": 3 * LAYERS + 1, "qwen2": 3 * LAYERS + 1}
IDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
in_every_dtype = pytest.mark.parametrize("dtype", IDS, ids=IDS.values())
plain = pytest.mark.parametrize("architecture", PLAIN)
# Every architecture in its usual dtype, and two in every dtype: compiling a model takes long.
PAIRS = [(architecture, torch.bfloat16) for architecture in EXACT]
PAIRS += itertools.product(("llama", "gemma2"), (torch.float16, torch.float32))
exact = pytest.mark.parametrize(("architecture", "dtype"), PAIRS, ids=[f"{name}-{IDS[dtype]}" for name, dtype in PAIRS])


def model_of(architecture: str, dtype: torch.dtype, **more: Any) -> Any:
    """In shapes that our kernels support, with logits close to each other, so that every rounding difference shows."""
    model = tiny_model(architecture, **{**SHAPE, **more})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.05)
    return model.to(dtype).cuda()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often our kernels for a few rows were launched."""
    counts: Counter[str] = Counter()
    beside, attended = gemv._side_by_side, attend._launched

    def counted(weights: Sequence[torch.Tensor]) -> Any:
        counts.update(["products", *(str(tuple(weight.shape)) for weight in weights)])
        return beside(weights)

    monkeypatch.setattr(gemv, "_side_by_side", counted)
    monkeypatch.setattr(attend, "_launched", lambda *args: (counts.update(["attention"]), attended(*args))[1])
    gated = gated_product.multiply_gated
    monkeypatch.setattr(gated_product, "multiply_gated", lambda *args: (counts.update(["gated"]), gated(*args))[1])
    tile = experts.expert_tiling
    monkeypatch.setattr(experts, "expert_tiling", lambda weights: (counts.update(["experts"]), tile(weights))[1])
    return counts


@exact
def test_logits_have_the_same_bits_in_passes_of_every_width(
    architecture: str, dtype: torch.dtype, launches: Counter[str]
) -> None:
    """Over several buckets, and wherever passes start."""
    chosen = random.Random(0)
    prompt, text = ([chosen.randrange(3, 1000) for _ in range(length)] for length in (117, 192))
    stack = LayerStack.of(model_of(architecture, dtype, **EXACT[architecture]))
    trial = WidthTrial(stack, CompiledLayers(), len(prompt) + len(text))
    expected = trial.logits(prompt, text, [1] * len(text))
    assert trial.passes.inexact is None
    assert trial.passes.graphs.compiled is not None
    assert launches["products"] > 0
    assert launches["products"] % PRODUCTS.get(architecture, 4 * LAYERS + 1) == 0, launches
    assert (launches["experts"] > 0) == (architecture == "mixtral")
    assert (launches["gated"] > 0) == (architecture == "qwen2")
    assert launches["attention"] > 0
    assert launches["attention"] % LAYERS == 0
    assert len(expected.unique(dim=0)) == len(text)
    assert trial.first_difference(prompt, text) is None


@exact
def test_lossless_answers_are_those_of_full_depth_bit_for_bit(
    architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter((1, 5, 3, 0, 9, 15, 2) * 2000)
    monkeypatch.setattr(TrackRecord, "window", lambda self: next(lengths))
    plan = dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[2])
    engine = dd.Engine(model_of(architecture, dtype, **EXACT[architecture]), plan=plan, compile=True)
    for prompt in [*PROMPTS, *([7, 8, 9] * 20 + [start] for start in range(5))]:
        full = engine.generate([prompt], 220, mode="full", eos_token_id=None)[0]
        assert full.exact is True
        for lookup in (True, False):
            result = engine.generate([prompt], 220, mode="lossless", eos_token_id=None, lookup=lookup)[0]
            assert (result.exact, result.inexact_because) == (True, None)
            assert result.drafted > 0
            assert result.token_ids == full.token_ids
    assert engine.lanes.chain.last is not None
    assert engine.lanes.chain.last.passes.graphs.compiled is engine.compiled  # no fallback


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "chat": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
}


@plain
@pytest.mark.parametrize("settings", SAMPLED.values(), ids=SAMPLED)
def test_seeded_answers_are_those_of_full_depth_bit_for_bit(
    architecture: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter((1, 5, 3, 0, 9, 15, 2) * 2000)
    monkeypatch.setattr(TrackRecord, "window", lambda self: next(lengths))
    plan = dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[2])
    engine = dd.Engine(model_of(architecture, torch.bfloat16, **EXACT[architecture]), plan=plan, compile=True)
    for seed, prompt in enumerate(PROMPTS):
        asked = {**settings, "do_sample": True, "seed": seed, "eos_token_id": None}
        full = engine.generate([prompt], 200, mode="full", **asked)[0]
        for lookup in (True, False):
            result = engine.generate([prompt], 200, mode="lossless", lookup=lookup, **asked)[0]
            assert (result.exact, result.inexact_because) == (True, None)
            assert result.drafted > 0
            assert result.token_ids == full.token_ids
    assert engine.lanes.chain.last is not None  # it ran as chained graphs, without a fallback
    assert engine.lanes.chain.last.passes.graphs.compiled is engine.compiled


@pytest.mark.parametrize("first_layers", [0, 2])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_learned_head_drafts_inside_the_graphs(
    architecture: str, first_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter((1, 5, 3, 0, 9, 15, 2) * 2000)
    monkeypatch.setattr(TrackRecord, "window", lambda self: next(lengths))
    model = model_of(architecture, torch.bfloat16, **EXACT[architecture])
    engine = dd.Engine(model, draft_head=random_head(model, first_layers, vocabulary=512), compile=True)
    for prompt in PROMPTS:
        for settings in ({}, {"do_sample": True, "seed": 1, "temperature": 0.7}):
            asked = {**settings, "eos_token_id": None}
            full = engine.generate([prompt], 150, mode="full", **asked)[0]
            result = engine.generate([prompt], 150, mode="lossless", lookup=False, **asked)[0]
            assert result.exact is True
            assert result.drafted > 0
            assert result.token_ids == full.token_ids
    chain = engine.lanes.chain.last
    assert chain is not None
    assert chain.passes.graphs.compiled is engine.compiled
    assert {key[1] for key in chain.passes.graphs.by_key if key[0] == "draft"} == {LEARNED}


def test_a_second_engine_says_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever passes run first, and with its own drafts."""
    lengths = iter((4, 2, 7) * 2000)
    monkeypatch.setattr(TrackRecord, "window", lambda self: next(lengths))
    model = model_of("qwen2", torch.bfloat16, **EXACT["qwen2"])
    full = dd.Engine(model, compile=True).generate(PROMPTS[:1], 200, mode="full", eos_token_id=None)[0]
    plan = dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[1, 2])
    lossless = dd.Engine(model, plan=plan, compile=True).generate(PROMPTS[:1], 200, mode="lossless", eos_token_id=None)
    assert lossless[0].token_ids == full.token_ids


def test_check_tells_of_bits() -> None:
    for architecture in ("llama", "gemma2"):
        model = model_of(architecture, torch.bfloat16, **EXACT[architecture])
        rows = {row.name: row for row in check_model(model)}
        found = rows["compiled lossless equals compiled full depth, bfloat16"]
        assert found.passed
        assert "exact: yes" in found.detail
        assert rows["the same bits in passes of any width, bfloat16"].passed
    rows = {row.name: row for row in check_model(model_of("llama", torch.bfloat16, **INEXACT["llama"][0]))}
    assert "exact: no" in rows["compiled lossless equals compiled full depth, bfloat16"].detail


def test_check_of_a_name_compares_bits_in_its_own_dtype(tmp_path: Path) -> None:
    model_of("llama", torch.bfloat16, **EXACT["llama"]).save_pretrained(tmp_path)
    rows = {row.name: row for row in dd.check(str(tmp_path))}
    for dtype in ("float32", "bfloat16"):
        assert f"compiled lossless equals compiled full depth, {dtype}" in rows
    assert rows["the same bits in passes of any width, bfloat16"].passed
    assert all(row.passed for row in rows.values())


@pytest.mark.parametrize("architecture", INEXACT)
def test_what_our_kernels_do_not_fit_says_so(architecture: str) -> None:
    changes, reason = INEXACT[architecture]
    engine = dd.Engine(model_of(architecture, torch.bfloat16, **changes), compile=True)
    full = engine.generate(PROMPTS[:1], 16, mode="full", eos_token_id=None)[0]
    with pytest.warns(UserWarning, match="may differ from full depth at near-ties"):
        result = engine.generate(PROMPTS[:1], 16, mode="lossless", eos_token_id=None)[0]
    for answer in (full, result):
        assert answer.exact is False
        assert reason in str(answer.inexact_because)
        assert len(answer.token_ids) == 16


def test_layers_that_run_as_they_are_say_so() -> None:
    engine = dd.Engine(model_of("llama", torch.bfloat16), compile=False)
    with pytest.warns(UserWarning, match="may differ from full depth at near-ties"):
        result = engine.generate(PROMPTS[:1], 8, mode="lossless", eos_token_id=None)[0]
    assert result.exact is False
    assert "not compiled" in str(result.inexact_because)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(8960, 1536), (11008, 4096), (13824, 5120), (4864, 896), (132 * 32, 64)])
def test_a_gated_product_s_rows_do_not_depend_on_their_number(rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn((16, columns), device="cuda").to(dtype)
    gate, up = (torch.randn((rows, columns), device="cuda").to(dtype) / columns**0.5 for _ in "ab")
    expected = gated_product.gated_product(x, gate, up, False)
    first, second = (x.double() @ weight.double().T for weight in (gate, up))
    whole = first / (1 + torch.exp(-first)) * second
    assert float((expected.double() - whole).norm() / whole.norm()) < 0.01
    for count in range(1, 17):
        begin = int(torch.randint(0, 17 - count, ()))
        some = gated_product.gated_product(x[begin : begin + count].contiguous(), gate, up, True)
        assert torch.equal(some, expected[begin : begin + count])


@in_every_dtype
@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        (1536, [1536, 256, 256]),
        (8960, [1536]),
        (1536, [8960, 8960]),
        (4096, [11008, 11008]),
        (512, [32]),
        (128, [96]),
        (576, [576, 192, 192]),
        (576, [97]),
        (4096, [8]),
    ],
)
def test_a_product_s_rows_do_not_depend_on_their_number(columns: int, rows: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn((200, columns), device="cuda").to(dtype)
    weights = [torch.randn((count, columns), device="cuda").to(dtype) for count in rows]
    expected = gemv.skinny_gemm(x, weights, False)
    whole = torch.cat([x.double() @ weight.double().T for weight in weights], dim=1)
    assert float((expected.sum(0).double() - whole).norm() / whole.norm()) < 1e-5
    for count in (*range(1, 19), 31, 32, 33, 47, 64, 65, 130):
        first = int(torch.randint(0, 201 - count, ()))
        some = gemv.skinny_gemm(x[first : first + count].contiguous(), weights, True)
        assert torch.equal(some, expected[:, first : first + count])


@in_every_dtype
@pytest.mark.parametrize(("experts_number", "choices", "each"), [(4, 2, False), (4, 2, True), (16, 6, True)])
def test_a_token_s_experts_do_not_depend_on_the_other_tokens(
    experts_number: int, choices: int, each: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights = torch.randn((experts_number, 512, 1024), device="cuda").to(dtype)
    chosen = torch.rand((40, experts_number), device="cuda").topk(choices).indices
    x = torch.randn((40 * choices if each else 40, 1024), device="cuda").to(dtype)
    expected = experts.expert_products(x, chosen, weights, each, False)
    vectors = x if each else x.repeat_interleave(choices, dim=0)
    whole = torch.bmm(weights[chosen.flatten()].double(), vectors.double().unsqueeze(-1)).squeeze(-1)
    assert float((expected.sum(0).double() - whole).norm() / whole.norm()) < 1e-5
    for first, count in ((0, 1), (3, 1), (5, 2), (7, 16), (1, 17), (2, 38)):
        tokens, pairs = slice(first, first + count), slice(first * choices, (first + count) * choices)
        some = experts.expert_products(x[pairs if each else tokens], chosen[tokens], weights, each, True)
        assert torch.equal(some, expected[:, pairs])


def asked(size: int, dtype: torch.dtype, tokens: int, positions: int, batch: int = 1) -> list[torch.Tensor]:
    """Queries, keys and values in our cache's layout."""
    torch.manual_seed(0)
    query = torch.randn((batch, tokens, 12, size), device="cuda").to(dtype).transpose(1, 2)
    states = (torch.randn((positions, batch, 2, size), device="cuda").to(dtype) for _ in "kv")
    return [query, *(state.permute(1, 2, 0, 3) for state in states)]


of_every_size = pytest.mark.parametrize("size", attend.HEAD_SIZES)
in_every_way = pytest.mark.parametrize(("window", "softcap"), [(None, None), (200, None), (2100, 20.0)])


@in_every_dtype
@of_every_size
@in_every_way
def test_attention_does_not_depend_on_tokens_beside_or_on_the_bucket(
    size: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    positions = 512 if window == 200 else 2560  # chunks of one length, and of two
    query, key, value = asked(size, dtype, 16, positions)
    last = positions - 202 + torch.arange(16, device="cuda")  # the last tokens see one chunk more
    spans = spans_of(torch.zeros(1, dtype=torch.long, device="cuda"), last)
    expected = attend.attend(query, key, value, spans, 0.1, window, softcap, False)
    for bucket in (positions - 128, positions):
        for first, count in ((0, 1), (0, 2), (3, 5), (9, 1), (15, 1), (8, 8)):
            part = slice(first, first + count)
            states = query[:, :, part], key[:, :, :bucket], value[:, :, :bucket], spans[:, :, part]
            assert torch.equal(attend.attend(*states, 0.1, window, softcap, True), expected[:, part])


@in_every_dtype
@of_every_size
@in_every_way
def test_attention_does_not_depend_on_padding_or_on_other_texts(
    size: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    query, key, value = asked(size, dtype, 3, 2560, batch=3)
    first = torch.tensor([0, 17, 1200], device="cuda")
    spans = spans_of(first, torch.arange(2550, 2553, device="cuda"))
    together = attend.attend(query, key, value, spans, 0.1, window, softcap, False)
    for row, padding in enumerate(first.tolist()):
        own = slice(row, row + 1)
        states = query[own], key[own, :, padding:], value[own, :, padding:], spans[own] - padding
        assert torch.equal(attend.attend(*states, 0.1, window, softcap, True), together[own])


@in_every_dtype
@of_every_size
@in_every_way
def test_a_row_of_a_batch_has_the_bits_that_it_has_alone(
    size: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    """Over blocks, with the fewest and the most rows; and over a contiguous cache."""
    torch.manual_seed(0)
    lengths = [1, 64, 65, 700, 2049, 2559, *range(90, 154)]
    rows, most = len(lengths), 160
    table = torch.randperm(rows * most, device="cuda").add(1).view(rows, 1, most).int()
    keys, values = (torch.randn(((rows * most + 1) * 16, 2, size), device="cuda").to(dtype) for _ in "kv")
    query = torch.randn((rows, 1, 12, size), device="cuda").to(dtype).transpose(1, 2)
    positions = torch.tensor(lengths, device="cuda") - 1

    def attended(chosen: list[int]) -> torch.Tensor:
        slots = torch.tensor(chosen, device="cuda")
        paged = Paged(table, slots, positions[slots], torch.tensor([len(chosen)], device="cuda"))
        return attend_paged(query[slots], keys, values, paged, 0, 0.1, window, softcap, exact=True)

    together = attended(list(range(rows)))
    for row in range(12):
        assert torch.equal(attended([row])[0], together[row])
        assert torch.equal(attended([row, 5, 3])[0], together[row])
        places = torch.arange(lengths[row], device="cuda")
        places = table[row, 0, places // 16].long() * 16 + places % 16
        states = [store[places].transpose(0, 1).unsqueeze(0) for store in (keys, values)]
        spans = spans_of(torch.zeros(1, dtype=torch.long, device="cuda"), positions[row : row + 1])
        alone = attend.attend(query[row : row + 1], *states, spans, 0.1, window, softcap, False)
        assert torch.equal(alone[0], together[row])
