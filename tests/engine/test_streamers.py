"""transformers' streamers and generation_config in Engine.generate work as in transformers' own generate."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_model import save_tiny_chat_model
from tiny_models import LAYERS, PROMPTS, tiny_model
from transformers import GenerationConfig, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import depthdecay as dd
from depthdecay.errors import ArgumentError


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[Any] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("mode", ["full", "decay", "lossless"])
def test_a_streamer_hears_what_generate_would_tell_it(mode: str) -> None:
    model, heard, theirs = tiny_model(), Heard(), Heard()
    plan = dd.Plan.decay(LAYERS, 1) if mode == "decay" else None
    (result,) = dd.Engine(model, plan=plan).generate(PROMPTS[:1], 12, mode=mode, streamer=heard)
    model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=12, do_sample=False, streamer=theirs)
    assert heard.values == theirs.values == [[PROMPTS[0]], *([token] for token in result.token_ids)]
    assert heard.ends == 1


def test_a_text_streamer_in_another_thread_gives_the_text(tmp_path: Path) -> None:
    engine = dd.Engine(dd.load(save_tiny_chat_model(tmp_path), device="cpu"))
    streamer = TextIteratorStreamer(engine.tokenizer, skip_prompt=True, skip_special_tokens=True)
    results: list[dd.Result] = []
    thread = threading.Thread(target=lambda: results.extend(engine.generate("hello", 16, streamer=streamer)))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == engine.tokenizer.decode(results[0].token_ids, skip_special_tokens=True)


def test_a_streamer_hears_of_the_end_where_decoding_fails() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    heard = Heard()
    with pytest.raises(RuntimeError, match="on purpose"):
        dd.Engine(tiny_model()).generate(PROMPTS[:1], 8, mode="full", logits_processor=fail, streamer=heard)
    assert heard.ends == 1


def test_what_is_no_streamer_and_a_batch_with_one_are_refused() -> None:
    engine = dd.Engine(tiny_model())
    with pytest.raises(ArgumentError, match="expected a transformers streamer"):
        engine.generate(PROMPTS[:1], 4, streamer=print)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="3 prompts; it can follow one"):
        engine.generate(PROMPTS, 4, streamer=Heard())


def test_a_generation_config_stands_over_the_models_own() -> None:
    model = tiny_model()
    engine = dd.Engine(model)
    model.generation_config.repetition_penalty = 1.7
    given = GenerationConfig(max_new_tokens=9, no_repeat_ngram_size=2)
    (result,) = engine.generate(PROMPTS[:1], generation_config=given)
    theirs = model.generate(torch.tensor(PROMPTS[:1]), generation_config=given)[0, len(PROMPTS[0]) :]
    assert result.token_ids == theirs.tolist()
    assert len(result.token_ids) == 9
    before = model.generation_config.to_dict()
    (shorter,) = engine.generate(PROMPTS[:1], 3, generation_config=given, repetition_penalty=1.0)
    assert len(shorter.token_ids) == 3  # the call's own arguments override both
    assert model.generation_config.to_dict() == before


def test_a_generation_config_counts_the_prompt_in_max_length() -> None:
    (result,) = dd.Engine(tiny_model()).generate(PROMPTS[:1], generation_config=GenerationConfig(max_length=16))
    assert len(result.token_ids) == 16 - len(PROMPTS[0])


def test_sampling_by_a_generation_config_is_seeded() -> None:
    engine = dd.Engine(tiny_model())
    given = GenerationConfig(do_sample=True, temperature=0.8, top_k=20)
    one, same = (engine.generate(PROMPTS[:1], 12, generation_config=given, seed=4)[0].token_ids for _ in range(2))
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    assert one == same == engine.generate(PROMPTS[:1], 12, seed=4, **settings)[0].token_ids


@pytest.mark.parametrize("given", [{"temperature": 0.5}, "greedy"])
def test_what_is_no_generation_config_is_refused(given: Any) -> None:
    with pytest.raises(ArgumentError, match="expected a transformers GenerationConfig"):
        dd.Engine(tiny_model()).generate(PROMPTS[:1], 4, generation_config=given)


def test_beams_of_a_generation_config_are_refused() -> None:
    with pytest.raises(dd.DepthDecayError, match="num_beams"):
        dd.Engine(tiny_model()).generate(PROMPTS[:1], 4, generation_config=GenerationConfig(num_beams=4))
