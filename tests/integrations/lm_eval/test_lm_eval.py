"""lm-evaluation-harness: at full depth its own answers, with a plan the engine's, and one-line errors."""

from __future__ import annotations

import importlib.util
import json
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from saved_model import save_tiny_chat_model
from typer.testing import CliRunner

from depthdecay import Plan
from depthdecay.cli import app
from depthdecay.engine.engine import Engine
from depthdecay.errors import DepthDecayError
from depthdecay.integrations.lm_eval import gsm8k
from depthdecay.model.load import load

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")

CONTEXTS = ["<s>one, two, three, four,", "a", "The quick brown fox", "<s>zwölf"]
PROBLEMS = [
    {"question": f"What is {n} + {n}?", "answer": f"It is <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"} for n in range(9)
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split in ("test", "train"):
        lines = "".join(json.dumps(problem) + "\n" for problem in PROBLEMS)
        (tmp_path / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


def our_model(folder: str, **settings: Any) -> Any:
    from depthdecay.integrations.lm_eval.model import DepthDecayLM

    return DepthDecayLM(folder, device="cpu", **settings)


def their_model(folder: str, **settings: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    loaded = load(folder, device="cpu")
    return HFLM(loaded.model, tokenizer=loaded.tokenizer, **settings)


def requests(contexts: list[str], **settings: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    arguments = [(context, {"do_sample": False, **settings}) for context in contexts]
    return [Instance("generate_until", {}, pair, index) for index, pair in enumerate(arguments)]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["lm-eval", *arguments])


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("depthdecay: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


# --- the model ------------------------------------------------------------------------------------------------------


@needs_lm_eval
@pytest.mark.parametrize("depth", [{}, {"alpha": "1"}, {"alpha": "0.9", "mode": "full"}])
def test_full_depth_gives_the_answers_of_lm_evals_own_model(tiny: str, depth: dict[str, str]) -> None:
    theirs, ours = their_model(tiny, batch_size=1), our_model(tiny, batch_size=3, **depth)
    free = theirs.generate_until(requests(CONTEXTS, max_gen_toks=24, until=[]), disable_tqdm=True)
    assert all(free)
    assert len(set(free)) == len(free)
    # Stop sequences that do occur: some characters from the middle of two answers.
    stops = [free[0][7:9], free[2][5]]
    for settings in ({"until": []}, {"until": stops}, {"until": stops[0], "max_gen_toks": 12}):
        asked = requests(CONTEXTS, **{"max_gen_toks": 24, **settings})
        expected = theirs.generate_until(asked, disable_tqdm=True)
        assert ours.generate_until(asked, disable_tqdm=True) == expected
        assert (expected == free) == (not settings["until"])
    assert ours.layer_speedup == 1


@needs_lm_eval
def test_a_prompt_that_is_too_long_is_cut_on_the_left_as_lm_eval_does(tiny: str) -> None:
    asked = requests(["x" * 20 + "the end of a text", "short"], max_gen_toks=8, until=[])
    theirs, ours = their_model(tiny, max_length=20), our_model(tiny, max_length=20)
    expected = theirs.generate_until(asked, disable_tqdm=True)
    assert ours.generate_until(asked, disable_tqdm=True) == expected


@needs_lm_eval
def test_a_plan_gives_the_engines_text(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load(tiny, device="cpu")
    plan = Plan.decay(8, "0.93")
    engine = Engine(loaded.model, loaded.tokenizer, plan)
    end = loaded.tokenizer.eos_token_id  # lm-eval always stops there, whatever the model's settings
    expected = engine.generate(CONTEXTS, 24, chat=False, eos_token_id=end)
    ours = our_model(tiny, plan=str(plan.save(tmp_path / "plan.json")), batch_size=4)
    texts = ours.generate_until(requests(CONTEXTS, max_gen_toks=24, until=[]), disable_tqdm=True)
    assert texts == [result.text for result in expected]
    full = engine.generate(CONTEXTS, 24, chat=False, eos_token_id=end, mode="full")
    assert texts != [result.text for result in full]
    assert ours.layers_executed == sum(result.layers_executed for result in expected)
    info = ours.get_model_info()
    assert info["depth_plan"] == plan.describe()
    assert info["layer_speedup"] == ours.layer_speedup > 1
    tokens = sum(len(result.token_ids) for result in expected)
    assert f"layer speed-up {ours.layer_speedup:.3f}x over {tokens} generated tokens" in capsys.readouterr().err


@needs_lm_eval
@pytest.mark.parametrize("depth", [{}, {"alpha": "0.9"}])
def test_lossless_mode_gives_full_depths_answers_and_names_what_drafts(tiny: str, depth: dict[str, str]) -> None:
    asked = requests(CONTEXTS, max_gen_toks=24, until=[])
    full, lossless = our_model(tiny), our_model(tiny, mode="lossless", **depth)
    assert lossless.generate_until(asked, disable_tqdm=True) == full.generate_until(asked, disable_tqdm=True)
    info = lossless.get_model_info()
    assert info["depth_plan"] == lossless.engine.drafting_plan.describe() != full.get_model_info()["depth_plan"]
    assert info["generated_tokens"] == full.get_model_info()["generated_tokens"] > 0


@needs_lm_eval
def test_a_stop_sequence_that_is_a_special_token_ends_the_answer(tiny: str) -> None:
    ours = our_model(tiny, batch_size=2)
    free = ours.generate_until(requests(CONTEXTS[:2], max_gen_toks=24, until=[]), disable_tqdm=True)
    mark = next(c for c in free[0][3:] if c.isascii() and c.isprintable() and c not in free[0][:3] + CONTEXTS[0])
    ours.tokenizer.add_special_tokens({"additional_special_tokens": [mark]})
    cut, other = ours.generate_until(requests(CONTEXTS[:2], max_gen_toks=24, until=[mark]), disable_tqdm=True)
    assert cut == free[0].partition(mark)[0]
    assert other == free[1].partition(mark)[0]


@needs_lm_eval
def test_log_likelihoods_are_those_of_the_full_model_and_said_to_be(tiny: str) -> None:
    from lm_eval.api.instance import Instance

    asked = [Instance("loglikelihood", {}, ("one, two,", " three"), 0)]
    expected = their_model(tiny).loglikelihood(asked, disable_tqdm=True)
    ours = our_model(tiny, alpha="0.9")
    with pytest.warns(UserWarning, match="depth decay has no effect: their scores are at full depth"):
        assert ours.loglikelihood(asked, disable_tqdm=True) == expected
    full = our_model(tiny, alpha="0.9", mode="full")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours.loglikelihood(asked, disable_tqdm=True)  # warned only once
        assert full.loglikelihood(asked, disable_tqdm=True) == expected


@needs_lm_eval
def test_model_arguments_that_would_do_nothing_are_refused(tiny: str) -> None:
    with pytest.raises(DepthDecayError, match="'peft' is not supported"):
        our_model(tiny, peft="adapter")
    with pytest.raises(DepthDecayError, match="unknown setting 'num_beams'"):
        our_model(tiny).generate_until(requests(["a"], max_gen_toks=4, until=[], num_beams=4), disable_tqdm=True)
    asked = requests(["a"], max_gen_toks=4, until=[], num_beams=1)  # some tasks set this to mean greedy search
    assert our_model(tiny).generate_until(asked, disable_tqdm=True) == their_model(tiny).generate_until(asked)


# --- the local tasks ------------------------------------------------------------------------------------------------


def asked_and_scored(folder: str, task: str, data: Path) -> tuple[str, dict[str, float]]:
    """The first prompt of a task, and its scores for three fixed answers."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    ours, prompts = our_model(folder), []

    def answers(asked: list[Any]) -> list[str]:
        prompts.extend(request.args[0] for request in asked)
        return ["The final answer is **$0**.", "So 1 + 1 = 2\n#### 2", "It is 5."]

    ours.generate_until = answers
    tasks = str(Path(gsm8k.__file__).parent)
    known = TaskManager(include_path=tasks, include_defaults=False, metadata={"data": str(data)})
    scores = simple_evaluate(ours, tasks=[task], task_manager=known, limit=3, bootstrap_iters=0)["results"][task]
    return prompts[0], {name: scores[f"exact_match,{name}"] for name in ("strict-match", "flexible-extract")}


@needs_lm_eval
def test_the_zero_shot_task_needs_no_examples(tiny: str, data: Path) -> None:
    (data / "train.jsonl").unlink()
    prompt, scores = asked_and_scored(tiny, "gsm8k_local", data)
    assert prompt.endswith("What is 0 + 0?")
    assert scores == {"strict-match": pytest.approx(1 / 3), "flexible-extract": pytest.approx(2 / 3)}


@needs_lm_eval
def test_the_8_shot_task_shows_examples_with_their_working(tiny: str, data: Path) -> None:
    prompt, scores = asked_and_scored(tiny, "gsm8k_local_8shot", data)
    assert [prompt.count("Question:"), prompt.count("####")] == [9, 8]
    assert prompt.endswith("Question: What is 0 + 0?\nAnswer:")
    assert scores["strict-match"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "a"}\n', "line 1 of"),
        ("\n[1]\n", "line 2 of"),
        ("{", "line 1 of"),
        ("\n", "contains no questions"),
        (b"\xff", "UTF-8"),
    ],
)
def test_a_file_that_is_not_gsm8k_is_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    file = tmp_path / "test.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DepthDecayError, match=message):
        gsm8k.read_problems(file)


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Namespace]:
    """Records what lm-eval is asked to run, instead of running it."""
    from lm_eval._cli import HarnessCLI

    seen: list[Namespace] = []
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, arguments: seen.append(arguments))
    return seen


@needs_lm_eval
def test_options_are_shared_out_between_us_and_lm_eval(executed: list[Namespace], data: Path) -> None:
    words = ("--tasks", "gsm8k,gsm8k_local_8shot", "--model", "M", "--alpha", "0.99", "--limit", "4", "-b", "2")
    more = ("--device", "cpu", "--model_args", "max_length=512", "--data", str(data), "--include_path", "mine")
    result = run(*words, *more)
    assert result.exit_code == 0, result.stderr
    (arguments,) = executed
    assert arguments.model == "depthdecay"
    assert arguments.model_args == {"pretrained": "M", "alpha": "0.99", "max_length": 512}
    assert arguments.tasks == ["gsm8k", "gsm8k_local_8shot"]
    assert (arguments.limit, arguments.batch_size, arguments.device) == (4.0, "2", "cpu")
    assert arguments.metadata == {"data": str(data)}
    assert arguments.include_path == [str(Path(gsm8k.__file__).parent), "mine"]


@needs_lm_eval
def test_data_alone_means_the_zero_shot_task(executed: list[Namespace], data: Path) -> None:
    assert run("--data", str(data / "test.jsonl")).exit_code == 0
    assert executed[0].tasks == ["gsm8k_local"]


@needs_lm_eval
def test_what_cannot_run_is_refused_in_one_line(executed: list[Namespace], data: Path) -> None:
    (data / "train.jsonl").unlink()
    few = ("--tasks", "gsm8k_local_8shot")
    assert "unrecognized arguments: --nonsense" in refused("--tasks", "gsm8k", "--nonsense")
    assert "add --data with test.jsonl" in refused(*few)
    assert "there is no file" in refused(*few, "--data", str(data / "none.jsonl"))
    assert "train.jsonl, which is not next to" in refused(*few, "--data", str(data))
    assert "use gsm8k_local_8shot" in refused("--data", str(data), "--num_fewshot", "3")
    (data / "bad.jsonl").write_text("no JSON")
    assert "line 1 of" in refused("--data", str(data / "bad.jsonl"))
    assert "--data is for the tasks" in refused("--tasks", "gsm8k", "--data", str(data))
    assert "--alpha and --speedup were given together" in refused("--alpha", "0.9", "--speedup", "1.2")
    assert "--device is 'toaster'" in refused("--tasks", "gsm8k", "--device", "toaster")
    assert executed == []


@needs_lm_eval
def test_what_lm_eval_refuses_is_one_line_and_what_breaks_below_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.config.evaluate_config import EvaluatorConfig

    assert "lm-eval: Specify --output_path if providing --log_samples" in refused("--tasks", "gsm8k", "--log_samples")

    def broken(*_: object, **__: object) -> None:
        raise ValueError("ours")

    monkeypatch.setattr(EvaluatorConfig, "process_tasks", broken)
    assert isinstance(run("--tasks", "gsm8k").exception, ValueError)


def test_without_lm_eval_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install '.[eval]'" in refused("--tasks", "gsm8k")
