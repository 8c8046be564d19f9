"""Every architecture that the plug-in adds, as tiny random models."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from vllm_engines import Answers, answered, asked, our_engine, save_tiny_model

from depthdecay import Plan
from depthdecay.integrations.vllm import ARCHITECTURES

PROMPTS = [[5, 17, 33, 8, 61, 12, 40, 3, 77, 21, 9] * 3, [44, 6, 90], [13, 28, 28, 55, 70, 31, 66]]
ALPHAS = ["0.9", "1", "0.97"]


@pytest.mark.parametrize("stock", ARCHITECTURES)
def test_each_architecture_gives_our_engines_answers(stock: str, tmp_path: Path) -> None:
    kind = stock.removesuffix("ForCausalLM").lower()
    folder = save_tiny_model(tmp_path, kind)
    answers = Answers(folder)
    engine = our_engine(folder, {}, stock, skip_tokenizer_init=True, max_model_len=200)
    expected = [answers(prompt, Plan.decay(8, alpha), 24) for prompt, alpha in zip(PROMPTS, ALPHAS, strict=True)]
    params = [asked(24, {"alpha": alpha}, detokenize=False) for alpha in ALPHAS]
    assert answered(engine, PROMPTS, params) == expected
    assert expected[0] != answers(PROMPTS[0], Plan.full(8), 24)
    del engine
    gc.collect()
