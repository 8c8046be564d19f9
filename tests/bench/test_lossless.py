"""The benchmark of lossless mode: what it counts, and that differences are reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_model import save_tiny_chat_model
from tiny_models import LAYERS, PROMPTS, tiny_model
from typer.testing import CliRunner

import depthdecay as dd
from depthdecay.bench.lossless import bench_engines, benchmark_lossless, drafters, run_lossless_bench
from depthdecay.bench.lossless_report import LosslessReport, divergence
from depthdecay.cli import app
from depthdecay.errors import DepthDecayError


def test_every_method_is_held_against_full_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    plans = {"guess": None, "measured": dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3])}
    report = run_lossless_bench(model, None, "tiny", PROMPTS, plans, new_tokens=12)
    rows = {row.method: row for row in report.lossless_rows}
    assert set(rows) == {
        *("full", "lossless, guess", "lossless, guess and lookup", "lossless, measured"),
        *("lossless, measured and lookup", "transformers generate", "transformers prompt-lookup"),
        "transformers early-exit",
    }
    assert all(row.error is None for row in rows.values()), [row.error for row in rows.values()]
    assert all(row.answers_that_differ == 0 for row in rows.values())
    assert rows["full"].tokens == len(PROMPTS) * 11
    assert rows["transformers generate"].tokens == len(PROMPTS) * 12
    assert rows["full"].speedup == 1.0
    drafted = rows["lossless, measured"]
    assert drafted.drafted >= drafted.accepted
    assert drafted.passes_per_token is not None
    assert "lossless_rows" in report.to_dict()
    assert not any(key.startswith("_") for row in report.to_dict()["lossless_rows"] for key in row)

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs).flip(-1)

    plain = type(model).generate
    monkeypatch.setattr(type(model), "generate", wrong)
    report = run_lossless_bench(model, None, "tiny", PROMPTS, {}, new_tokens=12, peers=["generate"])
    wrong_row = report.lossless_rows[-1]
    assert wrong_row.answers_that_differ == len(PROMPTS)
    assert [found.prompt for found in wrong_row.differences] == list(range(len(PROMPTS)))


def test_a_method_that_fails_in_the_middle_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    plain, calls = type(model).generate, []

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        if len(calls) == 3:  # after warming up and one prompt
            raise RuntimeError("no cache to crop")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "generate", failing)
    report = run_lossless_bench(model, None, "tiny", PROMPTS, {"guess": None}, new_tokens=8, peers=["generate"])
    rows = {row.method: row for row in report.lossless_rows}
    assert rows["transformers generate"].error == "RuntimeError: no cache to crop"
    assert rows["transformers generate"].speedup is None
    assert len(calls) == 3
    assert rows["full"].tokens == rows["lossless, guess"].tokens == len(PROMPTS) * 7


def test_a_peer_that_fails_leaves_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.config.num_hidden_layers //= (
            2  # as transformers' early exit does; it restores the value only if nothing fails
        )
        raise TypeError("no keys to crop")

    expected = [result.token_ids for result in dd.Engine(model).generate(PROMPTS, 8, mode="full")]
    monkeypatch.setattr(type(model), "generate", failing)
    report = run_lossless_bench(model, None, "tiny", PROMPTS, {"guess": None}, new_tokens=8, peers=["early-exit"])
    rows = {row.method: row for row in report.lossless_rows}
    assert rows["transformers early-exit"].error == "TypeError: no keys to crop"
    assert rows["lossless, guess"].answers_that_differ == 0
    assert [result.token_ids for result in dd.Engine(model).generate(PROMPTS, 8, mode="full")] == expected


def test_a_run_that_is_cut_off_has_saved_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr("depthdecay.bench.lossless.SAVE_EVERY", 0.0)
    parts: list[dict[str, Any]] = []

    def save(report: LosslessReport) -> None:
        parts.append(report.to_dict())
        if len(parts) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_lossless_bench(model, None, "tiny", PROMPTS, {}, new_tokens=8, peers=["generate"], compared=1, save=save)
    assert [part["settings"]["cut_off"] for part in parts] == [
        f"after {done} of {len(PROMPTS)} prompts" for done in (1, 2)
    ]
    full, peer = parts[1]["lossless_rows"]
    assert (full["prompts"], peer["prompts"]) == (2, 1)
    assert full["tokens"] == 14
    assert peer["speedup"] is not None


def test_a_difference_is_told_with_its_margin() -> None:
    model = tiny_model("llama")
    ids = PROMPTS[0]
    expected = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :].tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids + expected[:3]])).logits[0, -1]
    best, second = logits.topk(2)[1].tolist()
    assert best == expected[3]
    (found,) = divergence(model, 7, ids, expected, [*expected[:3], second, 0])
    assert (found.prompt, found.token) == (7, 3)
    assert found.margin == pytest.approx(float(logits[best] - logits[second]), abs=1e-4)
    assert 0 < found.spacing < 1e-5
    assert found.as_close >= 1 / 6
    assert divergence(model, 7, ids, expected, expected[:3]) == []


def test_what_cannot_run_leaves_a_row_that_says_why() -> None:
    model = tiny_model("llama")
    report = run_lossless_bench(model, None, "tiny", PROMPTS[:1], {}, new_tokens=4, peers=["assisted"])
    assert "give one as assistant" in str(report.lossless_rows[-1].error)
    with pytest.raises(DepthDecayError, match="peers contains 'magic'"):
        run_lossless_bench(model, None, "tiny", PROMPTS[:1], {}, new_tokens=4, peers=["magic"])


def test_slow_peers_run_on_some_prompts_only() -> None:
    model = tiny_model("llama")
    plans = {"one": dd.Plan.constant(LAYERS, 6), "two": dd.Plan.constant(LAYERS, 5)}
    report = run_lossless_bench(model, None, "tiny", PROMPTS, plans, new_tokens=6, peers=["generate"], compared=1)
    prompts = {row.method: row.prompts for row in report.lossless_rows}
    assert (
        prompts.pop("full") == prompts.pop("lossless, two") == prompts.pop("lossless, two and lookup") == len(PROMPTS)
    )
    assert set(prompts.values()) == {1}
    assert all(row.speedup is not None for row in report.lossless_rows)
    report = run_lossless_bench(model, None, "tiny", PROMPTS, plans, new_tokens=6, peers=["generate"], compared=0)
    assert [row.method for row in report.lossless_rows] == ["full", "lossless, two", "lossless, two and lookup"]
    assert all(row.speedup is not None and row.prompts == len(PROMPTS) for row in report.lossless_rows)


def test_python_gets_what_the_command_shows(tmp_path: Path) -> None:
    folder, file, partial = save_tiny_chat_model(tmp_path / "model"), tmp_path / "prompts.txt", tmp_path / "r.json"
    questions = [f"what is {i}?" for i in range(4)]
    file.write_text("\n".join(questions))
    words = ["bench", "-m", folder, "--device", "cpu", "--mode", "lossless", "--prompts", str(file), "--peers", "none"]
    result = CliRunner().invoke(app, [*words, "--limit", "2", "--new-tokens", "8", "--json", str(partial)])
    assert result.exit_code == 0, result.output
    loaded = dd.load(folder, device="cpu")
    report = benchmark_lossless(loaded, questions, limit=2, new_tokens=8, peers=[])
    theirs = json.loads(partial.read_text())
    counted = ("method", "prompts", "tokens", "answers_that_differ")
    assert [{name: row[name] for name in counted} for row in theirs["lossless_rows"]] == [
        {name: getattr(row, name) for name in counted} for row in report.lossless_rows
    ]
    assert theirs["settings"] == report.settings
    assert theirs["model"] == report.model == "model"  # not its path


def test_sampled_answers_are_held_against_seeded_full_depth(tmp_path: Path) -> None:
    loaded = dd.load(save_tiny_chat_model(tmp_path), device="cpu")
    report = benchmark_lossless(loaded, ["what is 1?", "what is 2?"], new_tokens=12, temperature=0.8)
    assert {row.method for row in report.lossless_rows} == {
        "full",
        "lossless, guessed layers",
        "lossless, guessed layers and lookup",
    }
    assert report.settings["temperature"] == 0.8
    assert all(row.answers_that_differ == 0 for row in report.lossless_rows)


@pytest.mark.parametrize("quantize", [None, "none"])
def test_the_embedded_model_runs_as_a_user_gets_it(quantize: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened(Exception):
        pass

    engines: list[dd.Engine] = []

    def opened(*given: Any, **named: Any) -> Any:
        engines.extend(bench_engines(*given, **named).values())
        raise Opened

    loaded = dd.load(device="cpu")
    users = dd.Engine(loaded, quantize=quantize)
    monkeypatch.setattr("depthdecay.bench.lossless.bench_engines", opened)
    with pytest.raises(Opened):
        benchmark_lossless(loaded, ["a question"], quantize=quantize)
    assert len(engines) > 1
    assert {engine.stack.layer_bytes() for engine in engines} == {users.stack.layer_bytes()}


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_weights_may_be_quantized(tmp_path: Path, quantize: str | None) -> None:
    loaded = dd.load(save_tiny_chat_model(tmp_path), device="cpu")
    report = benchmark_lossless(loaded, ["what is 1?"], new_tokens=8, peers=[], quantize=quantize)
    assert report.settings["quantize"] == quantize
    assert all(row.answers_that_differ == 0 for row in report.lossless_rows)


def test_drafters_are_a_guess_the_ladder_and_the_plan() -> None:
    plan = dd.Plan.constant(LAYERS, 4)
    assert list(drafters(None)) == ["guessed layers"]
    assert drafters(plan) == {"guessed layers": None, "calibrated": plan}
    repaired = replace(plan, repairs="repairs.safetensors")
    found = drafters(repaired)
    assert list(found) == ["guessed layers", "calibrated", "calibrated and repaired"]
    assert list(found.values()) == [None, plan, repaired]
    learned = replace(dd.Plan.full(LAYERS), draft_head="draft_head.safetensors")
    assert drafters(learned) == {"guessed layers": None, "learned head": learned}
    both = replace(repaired, draft_head="draft_head.safetensors")
    assert list(drafters(both).values()) == [None, plan, repaired, both]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"plan": "no-such-plan.json"}, "no plan at"),
        ({"compared": -1}, "compared is -1"),
        ({"new_tokens": 1}, "new_tokens is 1"),
        ({"quantize": "int3"}, "quantize is 'int3'"),
        ({"peers": ["beams"]}, "peers contains 'beams'"),
        ({"peers": ["generate"], "assistant": "x"}, "which peers generate leaves out"),
        ({"task": "chess"}, "prompts is a list"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 0.7, "peers": ["generate"]}, "peers sample differently"),
    ],
)
def test_bad_values_are_refused_by_pythons_names_before_a_model_is_loaded(given: Any, complaint: str) -> None:
    with pytest.raises(DepthDecayError, match=complaint) as caught:
        benchmark_lossless("no/such-model", ["a question"], **given)
    assert "--" not in str(caught.value)
