"""Self-generated questions and answers: varied, deterministic for a seed, and kept for resuming."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from saved_model import save_tiny_chat_model
from spoken_models import plain_spoken
from typer.testing import CliRunner

import depthdecay as dd
from depthdecay.calibration import own_questions, own_text, text_batches, work_folder
from depthdecay.calibration.own_questions import QuestionWriter, _question_in, _user_header, own_prompts
from depthdecay.calibration.own_text import OwnText, TooLittleTime, _Writing, write_own_text
from depthdecay.calibration.question_starts import OPENINGS, TOPICS
from depthdecay.calibration.text_batches import TextBatches
from depthdecay.calibration.work_folder import WORK_FOLDER
from depthdecay.cli import app
from depthdecay.errors import DepthDecayError
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.model.prompts import chat_text

LITTLE: dict[str, Any] = {
    **{"fit_prompts": 8, "held_out_prompts": 4, "new_tokens": 8, "width": 1, "repair_rank": 2, "repair_neurons": 0},
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_batches, "MOST_ROWS_ELSEWHERE", 8)
    monkeypatch.setattr(own_questions, "QUESTION_TOKENS", 24)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return plain_spoken(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return plain_spoken(tmp_path_factory.mktemp("base"), chat=False)


def engine_of(loaded: LoadedModel) -> dd.Engine:
    return dd.Engine(loaded.model)


def written(loaded: LoadedModel, tokens: int = 700, **settings: Any) -> list[OwnText]:
    return write_own_text(engine_of(loaded), loaded.tokenizer, tokens, answer_tokens=32, **settings)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<turn>{{ m['role'] }}\n{{ m['content'] }}</turn>\n{% endfor %}<turn>model\n"
)


@pytest.mark.parametrize(
    ("template", "control", "header", "end", "has_system"),
    [
        (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_start|>user\n", "<|im_end|>", True),
        (INST, [], "[INST] ", "[/INST]", True),
        (NO_SYSTEM, ["<turn>", "</turn>"], "<turn>user\n", "</turn>", False),
    ],
)
def test_any_templates_user_turn_is_found(
    tmp_path: Path, template: str, control: list[str], header: str, end: str, has_system: bool
) -> None:
    loaded = dd.load(save_tiny_chat_model(tmp_path), device="cpu")
    tokenizer: Any = loaded.tokenizer
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    found, mark, ids = _user_header(tokenizer, None)
    assert (found, mark) == (header, end)
    assert [tokenizer.convert_ids_to_tokens(number) for number in ids] == ([end] if control else [])
    writer = QuestionWriter(TextBatches(engine_of(loaded)), tokenizer, longest=None, seed=0)
    assert writer.has_system is has_system
    if has_system:
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
        assert chat_text(tokenizer, turns).startswith(_user_header(tokenizer, "Be brief.")[0] + "Why?")


@pytest.mark.parametrize(
    ("text", "ended", "expected"),
    [
        ("Why?<end> Because", False, "Why?"),
        (" is this\n\nx = 1 ", True, " is this\n\nx = 1"),
        ("What is this?\n\nIt is", False, "What is this?"),
        ("Is it so? I have heard that it is. And then", False, "Is it so? I have heard that it is."),
        ("And then it went on and", False, ""),
    ],
)
def test_a_question_ends_where_its_turn_does(text: str, ended: bool, expected: str) -> None:
    assert _question_in(text, "<end>", has_ended=ended) == expected


def test_questions_are_begun_in_all_languages_and_about_all_topics(chat: LoadedModel) -> None:
    writer = QuestionWriter(TextBatches(engine_of(chat)), chat.tokenizer, longest=None, seed=0)
    random = Random(0)
    starts = [chat.tokenizer.decode(writer._start(random)[1]) for _ in range(600)]
    assert all(any(f"in {language}." in start for start in starts) for language in OPENINGS if language != "English")
    assert all(any(topic in start for start in starts) for topic in TOPICS)
    assert len(set(starts)) > 500
    assert all(start.startswith("<system>") and "<user>" in start for start in starts)


@pytest.mark.parametrize("kind", ["chat", "base"])
def test_prompts_are_new_each_and_the_same_for_a_seed(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    loaded = request.getfixturevalue(kind)

    def prompts(seed: int, folder: str) -> list[list[int]]:
        return own_prompts(
            engine_of(loaded), loaded.tokenizer, 20, longest=200, seed=seed, folder=tmp_path / folder, say=print
        )

    found = prompts(0, "a")
    assert len(found) == 20
    assert len(set(map(tuple, found))) == 20
    assert all(len(prompt) <= 200 for prompt in found)
    assert prompts(0, "b") == found
    assert prompts(1, "b") != found
    if kind == "chat":
        assert all(loaded.tokenizer.decode(prompt).endswith("\n<assistant>") for prompt in found)


def test_answers_are_greedy_and_sampled_and_the_greedy_ones_are_the_models_own(chat: LoadedModel) -> None:
    texts = written(chat)
    assert sum(len(text.answer) for text in texts) >= 700
    assert {text.kind for text in texts} == {"own", "own sampled"}
    greedy = [text for text in texts if text.kind == "own"]
    for text in greedy[:3]:
        answer = engine_of(chat).generate([text.prompt], 32, mode="full", do_sample=False)[0]
        assert answer.token_ids[: len(text.answer)] == text.answer
    assert written(chat) == texts
    assert written(chat, seed=1) != texts


def test_prompts_of_all_lengths_are_answered_greedily_and_sampled_from_the_start(chat: LoadedModel) -> None:
    """There may be time for few of them."""
    prompts = [[5] * length for length in range(1, 65)]
    writing = _Writing(engine_of(chat), chat.tokenizer, prompts, 0.5, 16, 0, None, lambda message: None)
    lengths = [len(batch[0]) for batch, _, _ in writing.given]
    assert lengths != sorted(lengths)
    assert [sampled for _, _, sampled in writing.given[:4]] == [False, True, False, True]
    answered = sorted(tuple(prompt) for batch, _, sampled in writing.given if not sampled for prompt in batch)
    assert answered == sorted(map(tuple, prompts))


def test_the_users_prompts_have_their_share(chat: LoadedModel) -> None:
    prompts = [list(chat.tokenizer.encode(f"question number {number}?")) for number in range(40)]
    texts = written(chat, 1500, prompts=prompts, share_given=0.5)
    given = [text for text in texts if text.kind == "given"]
    assert {tuple(text.prompt) for text in given} <= set(map(tuple, prompts))
    tokens = sum(len(text.answer) for text in given)
    assert 0.3 < tokens / sum(len(text.answer) for text in texts) < 0.7
    assert {text.kind for text in written(chat, prompts=prompts, share_given=0.0)} == {"own", "own sampled"}
    with pytest.raises(DepthDecayError, match=r"share_given is 1\.5"):
        written(chat, share_given=1.5)


class Interrupted(Exception):
    """Simulates Ctrl-C between two batches."""


def test_an_interrupted_run_goes_on_behind_its_last_batch(chat: LoadedModel, tmp_path: Path) -> None:
    prompts = [list(chat.tokenizer.encode(f"question number {number}?")) for number in range(20)]
    whole = written(chat, 1200, prompts=prompts)
    said: list[str] = []

    def interrupt(message: str) -> None:
        said.append(message)
        if len(said) == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        written(chat, 1200, prompts=prompts, folder=tmp_path, say=interrupt)
    assert len(list((tmp_path / WORK_FOLDER).glob("own-text-*"))) == 3
    said.clear()
    assert written(chat, 1200, prompts=prompts, folder=tmp_path, say=said.append) == whole
    assert said[0].startswith("resuming after")
    # Text with another seed or model is not reused.
    said.clear()
    assert written(chat, 1200, prompts=prompts, folder=tmp_path, seed=5, say=said.append) != whole
    assert not said[0].startswith("resuming")


def test_too_little_text_is_a_sentence(chat: LoadedModel) -> None:
    with pytest.raises(DepthDecayError, match=r"wrote 0 tokens of usable text in the time .* at least 20,000"):
        written(chat, 50_000, until=time.monotonic())


def test_a_model_that_is_too_slow_is_known_by_its_first_questions(
    chat: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text, "LEAST_TOKENS", 10**9)
    with pytest.raises(TooLittleTime, match=r"at [\d,]+ tokens/s .* to write 1,000,000,000 tokens"):
        written(chat, 10**9, until=time.monotonic() + 100, folder=tmp_path)
    assert [file.name for file in (tmp_path / WORK_FOLDER).iterdir()] == ["own-questions-00000.json"]

    # Another run knows this without writing the questions again, and they can be used for other purposes.
    monkeypatch.setattr(TextBatches, "write", None)
    with pytest.raises(TooLittleTime, match="tokens/s"):
        written(chat, 10**9, until=time.monotonic() + 100, folder=tmp_path)
    monkeypatch.setattr(own_questions, "LEAST_QUESTIONS", 1)
    prompts = own_prompts(engine_of(chat), chat.tokenizer, 1, longest=200, seed=0, folder=tmp_path, say=print)
    assert len(prompts) == 1


def test_the_least_text_is_waited_for_but_not_longer_than_the_latest_time(
    chat: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text, "LEAST_TOKENS", 700)
    now = time.monotonic()
    texts = written(chat, 50_000, until=now, latest=now + 1000)
    last_batch = 8 * 32
    assert 700 <= sum(len(text.answer) for text in texts) < 700 + last_batch
    with pytest.raises(TooLittleTime, match="wrote 0 tokens"):
        written(chat, 50_000, until=now, latest=now)


def test_short_of_time_the_fewest_questions_are_written_and_kept(
    chat: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompts(until: float) -> list[list[int]]:
        settings: dict[str, Any] = {"longest": 200, "seed": 0, "folder": tmp_path, "say": print, "until": until}
        return own_prompts(engine_of(chat), chat.tokenizer, 40, **settings)

    few = prompts(time.monotonic())
    assert own_questions.LEAST_QUESTIONS <= len(few) < 40
    monkeypatch.setattr(TextBatches, "write", None)
    assert prompts(time.monotonic() + 1000) == few


def test_a_model_that_only_repeats_itself_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "_FRUITLESS", 2)
    monkeypatch.setattr(text_batches, "MOST_ROWS_ELSEWHERE", 2)
    loaded = dd.load(save_tiny_chat_model(tmp_path), device="cpu")
    with torch.no_grad():
        loaded.model.lm_head.weight.zero_()
    with pytest.raises(DepthDecayError, match="only repeated itself"):
        written(loaded, 5000)
    with pytest.raises(DepthDecayError, match=r"usable questions in \d+ tries"):
        own_prompts(engine_of(loaded), loaded.tokenizer, 4, longest=200, seed=0, folder=tmp_path, say=print)


def test_a_full_disk_is_a_sentence(chat: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(work_folder, "write_whole", full)
    with pytest.raises(DepthDecayError, match=r"cannot write to .*: No space left on device"):
        written(chat, folder=tmp_path)


def test_prompts_that_do_not_fit_and_a_missing_template_are_told(base: LoadedModel) -> None:
    said: list[str] = []
    written(base, 200, prompts=[[9] * 250, [9] * 5], say=said.append)
    assert said[0].startswith("this model has no chat template")
    assert said[1] == "1 prompts are longer than 224 tokens and are left out"


def test_without_a_tokenizer_nothing_can_be_asked(chat: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(DepthDecayError, match="no tokenizer, so it cannot write questions"):
        write_own_text(engine_of(chat), None, 100)
    loaded = LoadedModel(chat.model, None, "tiny", "folder")
    with pytest.raises(DepthDecayError, match="no tokenizer, so it cannot write questions"):
        dd.calibrate(loaded, None, tmp_path / "out", speedup=1.2, **LITTLE)


def test_a_model_is_calibrated_without_prompts(chat: LoadedModel, tmp_path: Path) -> None:
    said: list[str] = []
    plan = dd.calibrate(chat, None, tmp_path / "called", speedup=1.2, progress=said.append, **LITTLE)
    assert any(line.startswith("the model writes questions") for line in said)
    assert plan.notes["calibration"]["calibration prompts"] >= 8
    assert not (tmp_path / "called" / WORK_FOLDER).exists()
    effort = [word for name, value in LITTLE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    folder = str(tmp_path / "typed")
    command = ["calibrate", "-m", chat.name, "--device", "cpu", "--out", folder, "--speedup", "1.2", *effort]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert dd.Plan.load(folder).ladder == plan.ladder


def test_a_task_needs_its_file(tmp_path: Path) -> None:
    with pytest.raises(DepthDecayError, match="task is gsm8k, but prompts is None"):
        dd.calibrate("no/such-model", None, tmp_path / "out", task="gsm8k")


def test_the_embedded_model_asks_in_words(tmp_path: Path) -> None:
    loaded = dd.load("smollm2-135m", device="cpu")
    engine = dd.Engine(loaded.model, origin=loaded.origin, quantize=loaded.quantize_as_filed())
    writer = QuestionWriter(TextBatches(engine), loaded.tokenizer, longest=None, seed=0)
    prompts = [loaded.tokenizer.decode(prompt) for prompt in writer.write(0, 6)]
    assert len(prompts) >= 2
    questions = [prompt.split("<|im_start|>user\n")[1].removesuffix(END) for prompt in prompts]
    for prompt, question in zip(prompts, questions, strict=True):
        assert prompt.endswith(END)
        assert "<|im_" not in question
    assert max(len(question.split()) for question in questions) > 5


END = "<|im_end|>\n<|im_start|>assistant\n"  # of the user's turn
