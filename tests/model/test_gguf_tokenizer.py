"""A GGUF file's tokenizer matches the file and llama.cpp, also after saving and loading."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from saved_llamas import refusal
from tiny_ggufs import CHATML, CONTROL, FAMILIES, GEMMA_TURNS, NORMAL, byte_level, save_tiny_gguf
from transformers import AutoTokenizer

from depthdecay.model import load as models
from depthdecay.model.gguf_fields import TokenizerFields
from depthdecay.model.gguf_reference import ReferenceTokenizer, read_fields
from depthdecay.model.gguf_splits import SPLITS
from depthdecay.model.gguf_tokenizer import end_ids, make_tokenizer
from depthdecay.model.prompts import chat_ids, prompt_ids

# llama.cpp's own output for these texts and files, with the special tokens that it adds.
_SEEN = json.loads((Path(__file__).parents[1] / "data" / "llama_cpp_tokens.json").read_text(encoding="utf-8"))
FIRST, SECOND = _SEEN["texts"]
LLAMA_CPP: dict[str, list[list[int]]] = _SEEN["token_ids"]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "cache"))
    return tmp_path


def fields_of(folder: Path, family: str, change: Any = None) -> TokenizerFields:
    return read_fields(save_tiny_gguf(folder / f"{family}.gguf", family, change))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_text_becomes_what_llama_cpp_makes_of_it(family: str, cached: Path) -> None:
    path = save_tiny_gguf(cached / "model.gguf", family)
    for _ in range(2):  # fresh from the file, then from the cache
        tokenizer = models.load(str(path), device="cpu").tokenizer
        assert [prompt_ids(tokenizer, text, chat=False) for text in (FIRST, SECOND)] == LLAMA_CPP[family]
    reference = ReferenceTokenizer(read_fields(path))
    bos = [reference.fields.bos] if reference.fields.adds_bos else []
    assert [bos + reference.encode(text) for text in (FIRST, SECOND)] == LLAMA_CPP[family]
    assert tokenizer is not None
    assert tokenizer.decode(LLAMA_CPP[family][0], skip_special_tokens=True) == FIRST


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize(("family", "otherwise"), [("llama-spm", True), ("llama-bpe", True), ("qwen2", False)])
def test_bos_as_the_file_says_or_as_its_kind_has_it(
    family: str, otherwise: bool, said: bool | None, tmp_path: Path
) -> None:
    def change(writer: Any) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.add_bos_token", None)
        if said is not None:
            writer.add_add_bos_token(said)

    fields = fields_of(tmp_path, family, change)
    tokenizer = make_tokenizer(fields)
    tokenizer.save_pretrained(tmp_path / "saved")
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert (one.encode("the")[0] == fields.bos) == (otherwise if said is None else said)


def test_eos_where_the_file_adds_one(tmp_path: Path) -> None:
    fields = fields_of(tmp_path, "llama-spm", lambda writer: writer.add_add_eos_token(True))
    make_tokenizer(fields).save_pretrained(tmp_path / "saved")
    ids = AutoTokenizer.from_pretrained(tmp_path / "saved").encode("the")
    assert (ids[0], ids[-1], len(ids)) == (fields.bos, fields.eos, 3)


def test_a_conversation_has_one_bos_whoever_writes_it(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "the"}]
    own = fields_of(tmp_path, "gemma3")
    assert make_tokenizer(own).chat_template == GEMMA_TURNS
    # A template without BOS, in a file that wants one.
    without = fields_of(tmp_path, "llama-spm", lambda writer: writer.add_chat_template(CHATML))
    for fields in (own, without):
        ids = chat_ids(make_tokenizer(fields), messages)
        assert (ids[0], ids.count(ids[0])) == (fields.bos, 1)
    none = fields_of(tmp_path, "qwen2")
    assert none.bos not in chat_ids(make_tokenizer(none), messages)


def test_answers_end_at_each_of_the_files_ends(cached: Path) -> None:
    loaded = models.load(str(save_tiny_gguf(cached / "model.gguf", "gemma3")), device="cpu")
    assert loaded.tokenizer is not None
    ends = loaded.tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    assert loaded.model.generation_config is not None
    assert loaded.model.generation_config.eos_token_id == ends
    assert loaded.tokenizer.eos_token == "<eos>"
    # No end-of-turn key, only a template and a control token's text.
    fields = fields_of(cached, "qwen2")
    assert [fields.tokens[index] for index in end_ids(make_tokenizer(fields), fields)] == [
        "<|im_end|>",
        "<|endoftext|>",
    ]


def test_control_tokens_that_byte_level_letters_cannot_spell_keep_their_ids(tmp_path: Path) -> None:
    marks = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
    fields = fields_of(tmp_path, "qwen2", lambda writer: _described(writer, "deepseek-coder", marks))
    tokenizer = make_tokenizer(fields)
    assert len(tokenizer) == len(fields.tokens)
    first = len(fields.tokens) - 2
    assert tokenizer.encode("".join(marks), add_special_tokens=False) == [first, first + 1]


# How text is split into words. Some pre-tokenizers split all digits, some groups of three, some none.


@pytest.fixture(scope="module")
def bytes_alone(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFields:
    return fields_of(tmp_path_factory.mktemp("gguf"), "qwen2", lambda writer: _described(writer, "gpt-2"))


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 12345", "\n\n", " now"]),
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "\n\n", " now"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", "\n\n", " now"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "\n\n", " now"]),
        ("falcon", ["I", "'", "ll", " pay", " ", "123", "45", "\n\n", " now"]),
        ("tekken", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "\n\n", " now"]),
        ("deepseek-coder", ["I", "'", "ll", " pay", " ", "1", "2", "3", "4", "5", "\n", "\n", " now"]),
    ],
)
def test_words(pre: str, words: list[str], bytes_alone: TokenizerFields) -> None:
    fields = replace(bytes_alone, pre=pre, split=SPLITS[pre])
    text = "I'll pay 12345\n\n now"
    pieces = make_tokenizer(fields).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    cut = [text[start:end] for _, (start, end) in pieces]
    assert cut == ReferenceTokenizer(fields)._words(text)
    assert cut == words


def _described(writer: Any, pre: str, marks: list[str] | None = None) -> None:
    writer.kv_data[0] = {key: value for key, value in writer.kv_data[0].items() if "tokenizer" not in key}
    byte_level(writer, pre, [(mark, CONTROL) for mark in marks or []])


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_split_loses_nothing(pre: str, bytes_alone: TokenizerFields) -> None:
    fields = replace(bytes_alone, pre=pre, split=SPLITS[pre])
    tokenizer = make_tokenizer(fields)
    for text in (FIRST, SECOND, "你好，世界 ١٢٣ ½ naïve ＡＢ\u00a0\u3000\n \t "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert ids == ReferenceTokenizer(fields).encode(text)


@pytest.mark.parametrize("pre", ["", "default"])
def test_a_file_that_names_no_pre_tokenizer_is_split_as_gpt2_and_says_so(pre: str, tmp_path: Path) -> None:
    fields = fields_of(tmp_path, "qwen2", lambda writer: _described(writer, pre))
    with pytest.warns(UserWarning, match="names no pre-tokenizer"):
        tokenizer = make_tokenizer(fields)
    assert tokenizer.tokenize(" 123") == ["Ġ", "123"]  # one word; Qwen2 would have four
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_tokenizer(fields_of(tmp_path, "gemma3"))  # a kind that has no pre-tokenizer


def test_accents_are_composed_where_the_model_was_trained_so(cached: Path) -> None:
    decomposed = "cafe\u0301"
    for family, composed in (("qwen2", True), ("llama-bpe", False), ("gemma3", False)):
        tokenizer = models.load(str(save_tiny_gguf(cached / f"{family}.gguf", family)), device="cpu").tokenizer
        ids = prompt_ids(tokenizer, decomposed, chat=False)
        assert (ids == prompt_ids(tokenizer, "café", chat=False)) == composed, family


def test_what_is_not_known_is_refused_by_its_name(cached: Path) -> None:
    path = save_tiny_gguf(cached / "odd.gguf", "qwen2", lambda writer: _described(writer, "kimi-k9"))
    assert "'kimi-k9'" in refusal(path)
    path = save_tiny_gguf(cached / "bert.gguf", "qwen2", lambda writer: writer.add_tokenizer_model("bert"))
    assert "'bert'" in refusal(path)


def test_a_vocabulary_that_is_incomplete_is_refused(cached: Path) -> None:
    def fewer_types(writer: Any) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.token_type")
        writer.add_token_types([NORMAL] * 3)

    message = refusal(save_tiny_gguf(cached / "types.gguf", "qwen2", fewer_types))
    assert "incomplete" in message
    assert "3 types" in message


def test_the_embedded_file_is_split_as_its_name_says(gguf_file: Path) -> None:
    fields = TokenizerFields.of(gguf.GGUFReader(gguf_file), gguf_file)
    assert fields.pre == "smollm"
    # Each digit by itself, also in other scripts, as SmolLM2 was trained.
    assert make_tokenizer(fields).tokenize("½½") == ["Â½", "Â½"]
