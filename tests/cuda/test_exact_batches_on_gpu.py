"""Batch-invariant answers on a GPU: bitwise independent of the other rows. Skipped without one."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from batches import Windows, random_repairs, submit
from company import answers, check_company, mixed_asks
from tiny_models import PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.batching.exact_rows import ROWS_PICKED
from depthdecay.cuda.kernels import gemv
from depthdecay.engine.request import prepare_request
from depthdecay.engine.sampling import Sampler, pick_tokens
from depthdecay.errors import DepthDecayError
from depthdecay.runners.block_runner import MOST_IN_STEPS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

LAYERS, HIDDEN = 6, 512
TOKENS = 1000  # from which prompts are drawn
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 128, "vocab_size": 1001},
    "gpt_neox": {"num_key_value_heads": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 100},
    "gemma2": {"head_dim": 256, "sliding_window": 100, "attn_implementation": "eager"},  # softcap
}
PLAN = dd.Plan.decay(LAYERS, "0.97")
LENGTHS = (3, 17, 60, MOST_IN_STEPS, 300, 700)
EXACT = BatchSettings(max_batch=64, prefill_tokens=1024, cohort_seconds=0, max_positions=1024, exact=True)


def model_of(architecture: str = "llama", dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    """In shapes that our kernels support, with logits close to each other, so that every rounding difference shows."""
    model = tiny_model(architecture, **{**SHAPE, **ARCHITECTURES[architecture], **more})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.05)
    return model.to(dtype).cuda()


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [(name, torch.bfloat16) for name in ARCHITECTURES] + [("llama", torch.float16), ("qwen2", torch.float32)],
)
def test_an_answer_has_the_same_bits_alone_and_in_company(
    architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full, decayed with maps, and lossless with drafts; greedy and seeded; short and long prompts; random arrivals."""
    products: Counter[str] = Counter()
    beside = gemv._side_by_side
    monkeypatch.setattr(gemv, "_side_by_side", lambda weights: (products.update(["ours"]), beside(weights))[1])
    windows = Windows(monkeypatch)
    engine = dd.Engine(model_of(architecture, dtype), plan=PLAN, repairs=random_repairs(PLAN, HIDDEN), compile=True)
    batcher = Batcher(engine, EXACT)
    assert batcher.inexact is None
    assert products["ours"] > 0
    asks = mixed_asks(64, TOKENS, 24, LENGTHS, PLAN, ("full", "decay", "lossless"))
    for ask in asks:
        if ask["mode"] == "lossless":
            ask.pop("logprobs", None)  # such rows decode token by token
    for ask, (tokens, _) in zip(asks, answers(batcher, asks, 1), strict=True):
        if ask["mode"] == "lossless":
            windows.knows(ask["prompt"], tokens)
    alone = check_company(batcher, asks, (3, 20, 64))
    assert 0 < batcher.counters.accepted < batcher.counters.drafted
    assert len({tuple(tokens) for tokens, _ in alone}) > 32  # the answers are not all the same text


def test_lossless_rows_say_what_full_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(monkeypatch)
    batcher = Batcher(dd.Engine(model_of("qwen2"), plan=PLAN, compile=True), EXACT)
    asks = mixed_asks(24, TOKENS, 40, LENGTHS, PLAN, ("full",))
    for ask in asks:
        ask.pop("logprobs", None)
    full = answers(batcher, asks, 24)
    for ask, (tokens, _) in zip(asks, full, strict=True):
        windows.knows(ask["prompt"], tokens)
    lossless = answers(batcher, [{**ask, "mode": "lossless"} for ask in asks], 9)
    assert [tokens for tokens, _ in lossless] == [tokens for tokens, _ in full]
    assert batcher.counters.accepted > 0


def test_the_engine_answers_several_prompts_as_each_alone() -> None:
    engine = dd.Engine(model_of(), plan=PLAN, compile=True)
    prompts = [*PROMPTS, *([start, 5, 9] * 30 for start in range(10, 19))]
    for mode in ("full", "decay", "lossless"):
        together = engine.generate(prompts, 60, mode=mode, exact=True, eos_token_id=None)
        for prompt, result in zip(prompts, together, strict=True):
            assert (result.exact, result.inexact_because) == (True, None)
            (single,) = engine.generate([prompt], 60, mode=mode, exact=True, eos_token_id=None)
            assert single.token_ids == result.token_ids


def test_batches_of_other_sizes_give_the_same_answers() -> None:
    """An answer does not depend on the server's batch size."""
    engine = dd.Engine(model_of(), compile=True)
    asks = mixed_asks(12, TOKENS, 30, LENGTHS, None, ("full",))
    large = answers(Batcher(engine, EXACT), asks, 12)
    settings = BatchSettings(max_batch=3, prefill_tokens=512, max_positions=1000, exact=True)
    assert answers(Batcher(engine, settings), asks, 3) == large


def test_a_plain_batch_says_why_it_is_not_exact() -> None:
    batcher = Batcher(dd.Engine(model_of(), compile=True), BatchSettings(max_batch=4, max_positions=256))
    submit(batcher, PROMPTS[0], 4)
    results = []
    while not batcher.is_idle:
        results += [update.result for update in batcher.step() if update.result is not None]
    assert [(result.exact, "rows of a batch" in str(result.inexact_because)) for result in results] == [(False, True)]


@pytest.mark.parametrize(
    ("more", "compile", "reason"),
    [
        ({}, False, "not compiled"),
        ({"intermediate_size": 1000}, True, "does not divide"),
    ],
)
def test_what_our_kernels_do_not_fit_is_refused(more: dict[str, Any], compile: bool, reason: str) -> None:
    with pytest.raises(DepthDecayError, match=f"answers cannot be exact here: .*{reason}"):
        Batcher(dd.Engine(model_of(**more), compile=compile), EXACT)


@pytest.mark.parametrize("vocabulary", [1001, 1024, 32000])
def test_picks_do_not_depend_on_the_rows_beside_them(vocabulary: int) -> None:
    """With top-p: torch's order of sums along a row depends on the number of rows."""
    engine = dd.Engine(model_of(vocab_size=vocabulary), compile=False)
    settings = {"do_sample": True, "temperature": 0.9, "top_p": 0.7, "seed": 3}
    request = prepare_request(engine, [[5, 6, 7]], 200, settings)
    ids = torch.tensor([[5, 6, 7]], device="cuda")
    samplers = [
        Sampler(
            engine.stack.model,
            request.generation_config,
            ids,
            logits_processor=request.logits_processor,
            keys=[key],
            max_new_tokens=200,
        )
        for key in range(150)
    ]
    torch.manual_seed(0)
    logits = torch.randn((150, vocabulary), device="cuda").to(torch.bfloat16)
    alone = [pick_tokens([samplers[row]], [row], logits[row : row + 1], together=ROWS_PICKED)[0] for row in range(150)]
    for count in (2, 7, 8, 9, 64, 65, 150):
        rows = random.Random(count).sample(range(150), count)
        picked = pick_tokens([samplers[row] for row in rows], rows, logits[rows], together=ROWS_PICKED)
        assert picked == [alone[row] for row in rows]
