"""Prompts are split without overlap, answered, mixed with other kinds, and reduced if memory is small."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrations import SMALL, random_texts, token_prompts
from tiny_models import LAYERS, tiny_model

import depthdecay as dd
from depthdecay.calibration import kept_answers, recording
from depthdecay.calibration.continuations import continue_prompts, split_prompts, variety
from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.goal import Goal
from depthdecay.calibration.recording import Recording
from depthdecay.calibration.run import Calibration
from depthdecay.calibration.summary import layer_influence
from depthdecay.calibration.time_budget import TimeBudget
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerStack


def test_continuations_keep_the_order_of_the_prompts() -> None:
    engine = dd.Engine(tiny_model("llama"))
    prompts = token_prompts(5)
    prompts[2] = prompts[2] * 2
    texts = continue_prompts(engine, prompts, 6, batch=2)
    assert [list(text.prompt) for text in texts] == prompts
    alone = [engine.generate([prompt], 6, do_sample=False)[0].token_ids for prompt in prompts]
    assert [list(text.tokens) for text in texts] == alone


def test_prompts_are_split_without_overlap_and_too_few_are_refused() -> None:
    prompts = token_prompts(40)
    made = split_prompts(prompts * 2, None, vocabulary=96, calibration=30, held_out=10, longest=None, seed=0)
    calibration, held_out = {tuple(p) for p in made.calibration}, {tuple(p) for p in made.held_out}
    assert (len(calibration), len(held_out)) == (30, 10)
    assert not calibration & held_out
    again = split_prompts(prompts[::-1], None, vocabulary=96, calibration=30, held_out=10, longest=None, seed=0)
    assert again.held_out == made.held_out
    fewer = split_prompts(prompts, None, vocabulary=96, calibration=300, held_out=100, longest=None, seed=0)
    assert (len(fewer.calibration), len(fewer.held_out)) == (30, 10)
    assert not made.spare
    with_spare = split_prompts(prompts, None, vocabulary=96, calibration=20, held_out=10, longest=None, seed=0, spare=7)
    assert [len(part) for part in (with_spare.calibration, with_spare.held_out, with_spare.spare)] == [20, 10, 7]
    assert len({tuple(p) for part in vars(with_spare).values() for p in part}) == 37
    with pytest.raises(DepthDecayError, match="at least 12"):
        split_prompts(prompts[:11], None, vocabulary=96, calibration=30, held_out=10, longest=None, seed=0)
    with pytest.raises(DepthDecayError, match="40 are longer than 5 tokens"):
        split_prompts(prompts, None, vocabulary=96, calibration=30, held_out=10, longest=5, seed=0)


def test_a_model_with_nan_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(DepthDecayError, match="not finite"):
        Calibration(model, None, token_prompts(), tmp_path, SMALL)


def test_prompts_are_fewer_where_memory_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    each = 2.5 * SMALL.new_tokens * model.config.hidden_size * (LAYERS + 1) * 4
    monkeypatch.setattr("depthdecay.calibration.kept_answers.free_bytes", lambda device: each * (8 + 16.5) / 0.7)
    said: list[str] = []
    run = Calibration(model, None, token_prompts(), tmp_path, SMALL, say=said.append)
    assert run.fit.prompts + run.select.prompts == 16
    assert any("states of 16 prompts" in message for message in said)
    # A resumed run uses as many, whatever memory is free by then.
    monkeypatch.setattr("depthdecay.calibration.kept_answers.free_bytes", lambda device: each * (8 + 20.5) / 0.7)
    said.clear()
    Calibration(model, None, token_prompts(), tmp_path, SMALL, say=said.append)
    assert any("resuming with" in message for message in said)
    # Also if all had fit at first.
    monkeypatch.setattr("depthdecay.calibration.kept_answers.free_bytes", lambda device: each * 1000)
    whole = Calibration(model, None, token_prompts(), tmp_path / "whole", SMALL)
    monkeypatch.setattr("depthdecay.calibration.kept_answers.free_bytes", lambda device: each * (8 + 16.5) / 0.7)
    again = Calibration(model, None, token_prompts(), tmp_path / "whole", SMALL)
    assert again.fit.prompts == whole.fit.prompts > run.fit.prompts
    monkeypatch.setattr("depthdecay.calibration.kept_answers.free_bytes", lambda device: each * 5)
    with pytest.raises(DepthDecayError, match="no memory for calibration"):
        Calibration(model, None, token_prompts(), tmp_path / "other", SMALL)


class Letters:
    """A letter-level tokenizer: enough to tell prompts apart."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % 85 for letter in text][:40]


def test_prompts_of_other_kinds_are_mixed_in(tmp_path: Path) -> None:
    model = tiny_model("llama")
    own = ["".join(chr(97 + digit) for digit in prompt) for prompt in np.random.default_rng(1).integers(0, 26, (60, 9))]
    mixed = Calibration(model, Letters(), own, tmp_path / "mixed", SMALL)
    alone = Calibration(model, Letters(), own, tmp_path / "alone", replace(SMALL, variety=0.0))
    assert mixed.elsewhere is not None
    assert alone.elsewhere is None
    others = mixed.fit.prompts - alone.fit.prompts + mixed.select.prompts - alone.select.prompts
    assert others + mixed.elsewhere.prompts == int(0.5 * alone.fit.prompts)
    assert mixed.select.prompts == alone.select.prompts  # other kinds do not influence choices
    # The promise is about the user's kind of text.
    assert mixed.held_out.prompts == alone.held_out.prompts
    figures = mixed.make(Goal(speedup=1.2)).figures
    assert figures["elsewhere"]["prompts"] == mixed.elsewhere.prompts
    assert alone.make(Goal(speedup=1.2)).figures["elsewhere"] is None


def test_few_prompts_are_answered_more_than_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    few = replace(SMALL, fit_prompts=200)
    plain = Calibration(model, None, token_prompts(24), tmp_path / "plain", replace(few, again=0))
    run = Calibration(model, None, token_prompts(24), tmp_path / "again", few)

    def count(recording: Recording) -> int:
        return sum(batch.inputs.shape[0] for batch in recording.batches)

    assert count(run.fit) == 3 * count(plain.fit)
    assert count(run.select) == count(plain.select)  # choices and promises are based on greedy answers
    assert count(run.held_out) == count(plain.held_out)
    kept = run.work.read("again")
    assert len(kept) == 2 * count(plain.fit)
    assert len({tuple(tokens) for tokens in kept}) > len(kept) // 2  # the answers differ

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("answered again, though the answers lie there")

    monkeypatch.setattr("depthdecay.calibration.kept_answers.continue_prompts", refuse)
    resumed = Calibration(model, None, token_prompts(24), tmp_path / "again", few)
    assert count(resumed.fit) == count(run.fit)
    enough = replace(SMALL, fit_prompts=8)
    monkeypatch.undo()
    assert Calibration(model, None, token_prompts(24), tmp_path / "enough", enough).work.read("again") == []


def test_none_of_the_users_prompts_is_mixed_in_again() -> None:
    lines = resources.files("depthdecay").joinpath("data/variety.txt").read_text(encoding="utf-8").splitlines()
    texts = [line.replace("\\n", "\n") for line in lines]
    settings: Any = {"vocabulary": 90, "longest": None, "seed": 0}
    every = variety(1000, Letters(), besides=[], **settings)
    assert len(every) == len(texts) == len(set(texts))
    assert len(variety(1000, Letters(), besides=texts[:7], **settings)) == len(texts) - 7
    assert variety(1000, None, besides=[], **settings) == []
    assert len(variety(5, Letters(), besides=[], **settings)) == 5


def test_a_plan_promises_only_what_its_texts_reach(tmp_path: Path) -> None:
    """Answers that end early: with a longer horizon, no text would get the speed-up."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = list(range(3, 20))
    said: list[str] = []
    run = Calibration(model, None, token_prompts(), tmp_path, replace(SMALL, new_tokens=64), say=said.append)
    lengths = sorted(len(row) for batch in run.fit.batches for row in batch.inputs)
    assert lengths
    assert run.settings.new_tokens < 64
    assert any("that is the plan's horizon" in message for message in said)
    plan = run.make(Goal(speedup=1.15)).plan
    assert plan.schedule.to_dict()["horizon"] == run.settings.new_tokens
    deepest = plan.schedule.final_depth
    counts = Simulator(run.held_out).measure(plan).tokens_by_position
    assert sum(count for i, count in enumerate(counts) if plan.depth(i + 1) == deepest) > 0


def test_one_question_in_two_forms_is_one_prompt() -> None:
    class Tokenizer:
        chat_template = None

        def encode(self, text: str) -> list[int]:
            return [3 + ord(letter) % 80 for letter in text]

    texts = [f"hello  number {i}" for i in range(20)]
    doubled: list[Any] = [*texts, *(" ".join(text.split()) for text in texts)]
    made = split_prompts(doubled, Tokenizer(), vocabulary=96, calibration=300, held_out=100, longest=None, seed=0)
    calibration, held_out = {tuple(p) for p in made.calibration}, {tuple(p) for p in made.held_out}
    assert len(calibration) + len(held_out) == 20
    assert not calibration & held_out


def test_few_prompts_are_still_split() -> None:
    few = token_prompts(13)
    made = split_prompts(few, None, vocabulary=96, calibration=8, held_out=1000, longest=None, seed=0)
    assert len(made.calibration) == 8
    assert len(made.held_out) == 5


def test_a_recording_that_is_cut_short_has_texts_of_all_lengths() -> None:
    stack = LayerStack.of(tiny_model("llama"))
    texts = random_texts(40, 12)
    asked: list[int] = []
    whole = Recording.of(stack, texts, rows=4)
    told: list[int] = []
    some = Recording.of(
        stack,
        texts,
        rows=4,
        progress=lambda done, total: told.append(done),
        enough=lambda: asked.append(1) or len(asked) == 3,
    )
    assert told == [4, 8, 12]
    places = [
        place
        for place, batch in enumerate(whole.batches)
        if any(torch.equal(batch.inputs, found.inputs) for found in some.batches)
    ]
    assert len(places) == len(some.batches) == 3
    assert places[-1] - places[0] >= 5
    first = [batch.inputs[0].tolist() for batch in whole.batches]
    assert [batch.inputs[0].tolist() for batch in some.batches] == [first[place] for place in places]


def test_answers_and_recordings_leave_time_for_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def taking(seconds: float, done: Any) -> Any:
        def slowly(*given: Any, **named: Any) -> Any:
            now[0] += seconds
            return done(*given, **named)

        return slowly

    monkeypatch.setattr(kept_answers, "continue_prompts", taking(8, kept_answers.continue_prompts))
    monkeypatch.setattr(recording, "record", taking(4, recording.record))
    said: list[str] = []
    own = ["".join(chr(97 + digit) for digit in prompt) for prompt in np.random.default_rng(1).integers(0, 26, (60, 9))]
    minute = replace(SMALL, rows=4)
    run = Calibration(tiny_model(), Letters(), own, tmp_path, minute, time_budget=TimeBudget(1), say=said.append)
    assert "there is time for 16 of 52 prompts" in said  # a third part would end 6 s after its time, not 2 s before
    assert now[0] - 1000 == 2 * 8 + 4 * (len(run.select.batches) + len(run.held_out.batches) + len(run.fit.batches))
    assert run.elsewhere is None
    assert 0 < run.fit.prompts < len(run.fit_texts)
    assert now[0] - 1000 < 0.45 * 60 + 4
    run.make(Goal(speedup=1.2))
    now[0] = 1000.0
    ample = Calibration(tiny_model(), Letters(), own, tmp_path / "ample", minute, time_budget=TimeBudget(100))
    assert ample.elsewhere is not None
    assert ample.fit.prompts == len(ample.fit_texts)


def test_short_of_time_some_prompts_of_each_kind_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = tiny_model(), []
    hurried = replace(SMALL, whole_minutes=1e-9, lowest_share=0.2)
    with pytest.warns(UserWarning, match=r"the smallest calibration takes about \d+ s, but only 0 s were given"):
        run = Calibration(model, None, token_prompts(), tmp_path, hurried, say=said.append)
    assert "there is time for 8 of 40 prompts" in said
    assert 0 < run.fit.prompts < 8
    assert run.select.prompts > 0
    assert run.held_out.prompts > 0
    assert len(run.fit.batches) == 1
    plan = run.make(Goal(lossless=True)).plan
    assert plan.repairs
    fitted = [line for line in said if line.startswith("fitting maps for drafts")]
    assert len(run.found.order) == LAYERS - 2
    assert len(fitted) == 3  # for maps of one size, and none to see how long they take
    tried: list[dict[str, Any]] = run.make(Goal(speedup=1.2)).figures["tried"]
    assert len(tried) == 1  # the first shape that reaches the speed-up, with the first size
    said.clear()
    run.forget_traces()
    run._fastest_guess(Goal(max_kl=0.5))
    maps_fitted = [line for line in said if line.startswith("fitting maps at")]
    assert maps_fitted == [f"fitting maps at constant depth {LAYERS - 1}"]
    said.clear()
    monkeypatch.setattr(Calibration, "_fastest_guess", lambda run, goal: 1.2)
    with pytest.raises(DepthDecayError, match="no plan for this model"):
        run.make(Goal(max_kl=1e-9))
    assert said.count("measuring on held-out text") == 5  # of 1.2x to 1.0125x, each with half the gain
    monkeypatch.setattr(Simulator, "measure", lambda *_: pytest.fail("measured for a chart"))
    assert layer_influence(run) == []
    monkeypatch.undo()
    said.clear()
    again = Calibration(model, None, token_prompts(), tmp_path, hurried, say=said.append)
    assert "resuming with the texts of an interrupted run" in said
    assert again.fit.prompts == run.fit.prompts
    ample = Calibration(model, None, token_prompts(), tmp_path / "ample", replace(SMALL, whole_minutes=1e9))
    assert ample.fit.prompts + ample.select.prompts == 32
    assert len(layer_influence(ample)) == ample.stack.num_layers
