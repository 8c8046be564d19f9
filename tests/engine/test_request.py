"""What a request accepts, what it takes from the model's generation_config, and how it rejects the rest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saved_model import save_tiny_chat_model
from tiny_models import VOCABULARY, tiny_model
from transformers import GenerationConfig, LogitsProcessorList

import depthdecay as dd
from depthdecay.engine.request import DEFAULT_NEW_TOKENS, Request, prepare_request
from depthdecay.engine.sampling import ScoreChanges
from depthdecay.errors import DepthDecayError
from depthdecay.model.load import load

IDS = [5, 17, 33]


@pytest.fixture(scope="module")
def engine() -> dd.Engine:
    return dd.Engine(tiny_model())


@pytest.fixture(scope="module")
def chat_engine(tmp_path_factory: pytest.TempPathFactory) -> dd.Engine:
    loaded = load(save_tiny_chat_model(tmp_path_factory.mktemp("tiny")), device="cpu")
    return dd.Engine(loaded.model, loaded.tokenizer)


def prepare(engine: dd.Engine, prompts: Any = (IDS,), max_new_tokens: Any = None, **settings: Any) -> Request:
    return prepare_request(engine, prompts, max_new_tokens, settings)


def refused(engine: dd.Engine, prompts: Any = (IDS,), max_new_tokens: Any = None, **settings: Any) -> str:
    with pytest.raises(DepthDecayError) as caught:
        prepare(engine, prompts, max_new_tokens, **settings)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 400
    return line


def engine_with(tokenizer: Any = None, **generation: Any) -> dd.Engine:
    """An engine whose model's generation_config has these settings, valid or not."""
    model = tiny_model()
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    for name, value in generation.items():
        setattr(model.generation_config, name, value)  # bypasses transformers' own checks, as an old file does
    return dd.Engine(model, tokenizer)


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts",
    [
        [IDS, IDS],
        (tuple(IDS), tuple(IDS)),
        torch.tensor([IDS, IDS]),
        np.array([IDS, IDS]),
        [torch.tensor(IDS), torch.tensor([IDS])],
        [np.array(IDS), np.array([IDS], dtype=np.int32)],
        [list(np.array(IDS)), list(torch.tensor(IDS))],
    ],
)
def test_token_ids_in_any_container(engine: dd.Engine, prompts: Any) -> None:
    assert prepare(engine, prompts).prompts == [IDS, IDS]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ({"input_ids": IDS, "attention_mask": [1, 1, 1]}, "input_ids"),
        ([{"input_ids": IDS}], "input_ids"),
        ([{"role": "user", "content": "hi"}], "list of messages"),
        (IDS, "[[1, 2, 3]]"),
        (torch.tensor(IDS), "[[1, 2, 3]]"),
        (np.array(IDS), "[[1, 2, 3]]"),
        ([torch.tensor([IDS, IDS])], "2 rows"),
        ([np.array([IDS, IDS])], "2 rows"),
        (torch.zeros(2, 2, 2, dtype=torch.long), "2 rows"),
        (5, "prompts is 5"),
        (torch.tensor(5), "prompts is tensor(5)"),
        (None, "no prompt"),
        (torch.zeros(0, 3, dtype=torch.long), "no prompt"),
        (np.zeros((1, 0), dtype=int), "empty"),
        ([[1.5]], "1.5"),
        ([[math.inf]], "inf"),
        ([[math.nan]], "nan"),
        ([torch.tensor([1.0])], "1.0"),
        ([[True]], "True"),
        ([["1"]], "'1'"),
        ([[10**30]], "outside"),
        ([None], "NoneType"),
    ],
)
def test_prompts_that_are_none(engine: dd.Engine, prompts: Any, words: str) -> None:
    assert words in refused(engine, prompts)


def test_what_a_tokenizer_returns(chat_engine: dd.Engine) -> None:
    encoded = chat_engine.tokenizer("text")
    assert 'tokenizer("text")["input_ids"]' in refused(chat_engine, encoded)
    ids = encoded["input_ids"]
    assert prepare(chat_engine, [ids]).prompts == [ids]
    assert prepare(chat_engine, chat_engine.tokenizer("text", return_tensors="pt")["input_ids"]).prompts == [ids]


def test_half_a_character(chat_engine: dd.Engine) -> None:
    for chat in (True, False):
        assert "surrogate" in refused(chat_engine, ["a\ud800b"], chat=chat)
    assert "surrogate" in refused(chat_engine, [[{"role": "user", "content": "\udfff"}]])


# --- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        ({}, None, 256 - 3),  # the default, cut to the context
        ({"max_length": 20}, None, 256 - 3),
        ({"max_length": 40}, None, 40 - 3),
        ({"max_length": 40, "max_new_tokens": 9}, None, 9),
        ({"max_length": 40, "max_new_tokens": 9}, 7, 7),
        ({"max_length": 2}, 7, 7),
        ({"max_length": 4000}, None, 256 - 3),
        ({}, np.int64(7), 7),
    ],
)
def test_how_many_tokens(own: dict[str, Any], asked: Any, expected: int) -> None:
    assert DEFAULT_NEW_TOKENS == 256
    request = prepare(engine_with(**own), max_new_tokens=asked)
    assert request.max_new_tokens == expected
    assert type(request.max_new_tokens) is int
    assert request.generation_config.max_length == len(IDS) + expected


def test_max_length_is_what_generate_takes_it_for() -> None:
    engine = engine_with(max_length=14)
    expected = engine.stack.model.generate(torch.tensor([IDS]), attention_mask=torch.ones(1, 3))[0, 3:].tolist()
    assert engine.generate([IDS])[0].token_ids == expected
    assert "max_length to 3" in refused(engine_with(max_length=3))


def test_end_forced_at_the_last_token_as_generate_forces_it() -> None:
    engine = engine_with(forced_eos_token_id=9)
    assert engine.generate([IDS], max_new_tokens=6)[0].token_ids[-1] == 9


# --- the model's own settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_time", 3.0),
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("penalty_alpha", 0.6),
        ("token_healing", True),
        ("guidance_scale", 1.5),
        ("dola_layers", "low"),
        ("prompt_lookup_num_tokens", 3),
        ("assistant_early_exit", 2),
        ("do_sample", "yes"),
        ("repetition_penalty", "high"),
        ("eos_token_id", "x"),
        ("eos_token_id", [2, 1.5]),
        ("pad_token_id", "x"),
        ("max_new_tokens", "many"),
        ("max_length", "long"),
        ("bad_words_ids", [[]]),
        ("stop_strings", 5),
    ],
)
def test_settings_of_the_model_that_cannot_be_honoured_are_named(name: str, value: Any) -> None:
    line = refused(engine_with(**{name: value}))
    assert (name if name != "stop_strings" else "stop") in line


def test_other_ways_to_generate_are_refused() -> None:
    assert "constrained beam search" in refused(engine_with(force_words_ids=[[3]]))


def test_values_that_ask_for_nothing_are_fine() -> None:
    own = {"num_beams": 1, "num_return_sequences": 1, "penalty_alpha": 0.0, "guidance_scale": 1.0}
    assert prepare(engine_with(**own, token_healing=False)).generation_config.do_sample is False


def test_nonsense_matters_only_where_it_is_used() -> None:
    engine = engine_with(temperature="hot", top_k="few")
    assert prepare(engine).generation_config.temperature is None  # greedy
    line = refused(engine, do_sample=True)
    assert "generation_config" in line
    assert "temperature is 'hot'" in line
    assert "top_k" in refused(engine, temperature=0.5)
    assert prepare(engine, temperature=0.5, top_k=3).generation_config.top_k == 3


def test_a_file_with_nonsense(tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": "hot"}')
    loaded = load(folder, device="cpu")
    assert "temperature is 'hot'" in refused(dd.Engine(loaded.model))


def test_temperature_0_is_greedy_wherever_it_stands() -> None:
    assert prepare(engine_with(do_sample=True, temperature=0.0)).generation_config.do_sample is False
    assert prepare(engine_with(do_sample=True), temperature=0).generation_config.do_sample is False
    assert prepare(engine_with(do_sample=True)).generation_config.do_sample is True


def test_special_tokens_without_an_embedding() -> None:
    request = prepare(engine_with(eos_token_id=[VOCABULARY + 5, 7], pad_token_id=VOCABULARY))
    assert request.eos_token_ids == {VOCABULARY + 5, 7}
    assert request.pad_token_id == 7
    assert prepare(engine_with(eos_token_id=-1, pad_token_id=-1)).eos_token_ids == frozenset()


def test_stop_strings_of_the_model(chat_engine: dd.Engine) -> None:
    assert "tokenizer" in refused(engine_with(stop_strings=["x"]))
    engine = engine_with(chat_engine.tokenizer, stop_strings="x")
    assert prepare(engine).stop == ("x",)
    assert prepare(engine, stop=["y", "z"]).stop == ("y", "z")
    assert prepare(engine, stop=[]).stop == ()


# --- the caller's settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("stop", [5, [""], ["a", None], {"a": 1}]),
        ("top_k", [1.5, -1, "x", True]),
        ("top_p", [0, 1.5, "x", math.nan]),
        ("temperature", ["hot", math.inf, True, [1]]),
        ("typical_p", [0, 2]),
        ("do_sample", ["yes", 1]),
        ("repetition_penalty", [0, "x"]),
        ("no_repeat_ngram_size", [1.5, -1]),
        ("min_new_tokens", [1.5, "x"]),
        ("eos_token_id", ["x", 1.5, [2, "x"], VOCABULARY, True, {}]),
        ("pad_token_id", ["x", 500, 1.5, [0]]),
        ("bad_words_ids", [[[]], 5, [5], [["x"]], [[VOCABULARY]], "x"]),
        ("suppress_tokens", [5, ["x"], [VOCABULARY]]),
        ("sequence_bias", [5, {(): 1.0}, {(5,): "x"}, {5: 1.0}, {(VOCABULARY,): 1.0}]),
        ("frequency_penalty", [2.5, -3, "x", math.nan, True]),
        ("presence_penalty", [2.5, -3, "x", [1]]),
        ("logit_bias", [5, [[5, 1.0]], {"x": 1.0}, {VOCABULARY: 1.0}, {5: 101}, {5: "x"}, {(5,): 1.0}, {5: math.nan}]),
        ("logits_processor", [5, [5], LogitsProcessorList]),
        ("stopping_criteria", [5, [5], "x"]),
    ],
)
def test_settings_of_a_wrong_kind_are_named(engine: dd.Engine, name: str, values: list[Any]) -> None:
    for value in values:
        assert refused(engine, **{name: value}).startswith(name)


def test_seeds(engine: dd.Engine) -> None:
    for seed in (0, -5, 2**80, np.int32(3)):
        request = prepare(engine, seed=seed, do_sample=True)
        assert request.seed == seed
        assert type(request.seed) is int
    for seed in (1.0, True, "x", math.inf):
        assert refused(engine, seed=seed, do_sample=True).startswith("seed")


def test_numbers_of_numpy(engine: dd.Engine) -> None:
    config = prepare(
        engine,
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        top_p=np.float64(0.9),
        eos_token_id=np.array([3, 4]),
        pad_token_id=np.int64(1),
        bad_words_ids=np.array([[5, 6]]),
    ).generation_config
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 0.5, 3, 0.9)
    assert config.eos_token_id == [3, 4]
    assert config.bad_words_ids == [[5, 6]]


def test_no_end_of_text() -> None:
    engine = engine_with(eos_token_id=list(range(VOCABULARY)))
    assert len(engine.generate([IDS], max_new_tokens=5)[0].token_ids) == 1
    for none in ([], -1, [-1]):
        assert len(engine.generate([IDS], max_new_tokens=5, eos_token_id=none)[0].token_ids) == 5


def test_settings_that_change_the_scores_reach_the_text(engine: dd.Engine) -> None:
    plain = engine.generate([IDS], max_new_tokens=4)[0].token_ids
    for settings in (
        {"bad_words_ids": [[plain[0]]]},
        {"suppress_tokens": [plain[0]]},
        {"sequence_bias": {(plain[0],): -1000}},
        {"sequence_bias": [[[plain[0]], -1000.0]]},
    ):
        assert engine.generate([IDS], max_new_tokens=4, **settings)[0].token_ids[0] != plain[0]


def test_penalties_and_biases_of_zero_change_nothing(engine: dd.Engine) -> None:
    asked = prepare(engine, frequency_penalty=0, presence_penalty=np.float32(0), logit_bias={})
    assert asked.logits_processor == []
    assert prepare(engine, frequency_penalty=np.float64(-2), logit_bias={np.int64(5): 1}).logits_processor == [
        ScoreChanges(frequency_penalty=-2.0, logit_bias={5: 1.0})
    ]


def test_one_processor_or_criterion_alone(engine: dd.Engine) -> None:
    def only_nine(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -math.inf).index_fill(1, torch.tensor([9]), 0.0)

    def at_once(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.ones(ids.shape[0], dtype=torch.bool)

    for processor in (only_nine, [only_nine], LogitsProcessorList([only_nine])):
        assert engine.generate([IDS], max_new_tokens=3, logits_processor=processor)[0].token_ids == [9, 9, 9]
    for criterion in (at_once, [at_once]):
        result = engine.generate([IDS], max_new_tokens=3, stopping_criteria=criterion)[0]
        assert (len(result.token_ids), result.finish_reason) == (1, "stop")
