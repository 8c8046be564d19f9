"""The command line: what it prints, and that every user error is one line and exit code 2."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from saved_model import save_tiny_chat_model
from tiny_models import LAYERS, tiny_config, tiny_model
from transformers import AutoModelForMaskedLM
from typer.testing import CliRunner

from depthdecay import Plan
from depthdecay.calibration.drafter import expected
from depthdecay.cli import app
from depthdecay.cli.bench_kinds import KINDS
from depthdecay.cli.chat import Conversation
from depthdecay.cli.options import PlanOptions, plan_dict
from depthdecay.cli.show import depth_curve, depth_legend, depth_style
from depthdecay.engine.engine import Engine
from depthdecay.errors import DepthDecayError
from depthdecay.model.load import load
from depthdecay.plan.identity import identity

JSON_FIELDS = {
    *("text", "token_ids", "depths", "layers_executed", "layers_full", "layer_speedup", "ms_per_token"),
    *("tokens_per_second", "mode", "plan", "finish_reason", "seconds", "prompt_tokens", "model", "seed"),
    *("cache_bytes", "cache_bytes_saved", "lossless"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def run(*arguments: str, input: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=input)


def refused(*arguments: str, input: str | bytes | None = None) -> str:
    """Run something that must be refused: code 2, one line on stderr, nothing on stdout. Returns the line."""
    result = run(*arguments, input=input)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("depthdecay: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return str(result.stderr)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


# --- the program ----------------------------------------------------------------------------------------------------


def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from depthdecay.cli import app\n"
        "for words in (['--help'], ['--version'], ['generate', '--help'], ['demo', '--help']):\n"
        "    assert CliRunner().invoke(app, words).exit_code == 0, words\n"
        "assert CliRunner().invoke(app, ['generate', '--alpha', '2', 'hi']).exit_code == 2\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_module_runs_as_a_program() -> None:
    result = subprocess.run([sys.executable, "-m", "depthdecay", "--version"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.startswith("depthdecay 0.")


def test_usage_errors_exit_with_2() -> None:
    assert run("generate", "--no-such-option", "hi").exit_code == 2
    assert run("no-such-command").exit_code == 2


# --- generate -------------------------------------------------------------------------------------------------------


def test_piped_text_is_only_the_text(tiny: str) -> None:
    piped = run("generate", "-m", tiny, "-n", "12", "hello")
    assert piped.exit_code == 0, piped.output
    assert piped.stderr == ""
    answer = json.loads(run("generate", "-m", tiny, "-n", "12", "hello", "--json").stdout)
    assert piped.stdout == answer["text"] + "\n"
    assert "\x1b" not in piped.stdout.replace(answer["text"], "")


def test_depths_are_drawn_in_a_pipe_where_asked_for(tiny: str) -> None:
    piped = run("generate", "-m", tiny, "-n", "12", "--show-depth", "hello")
    assert piped.stdout == run("generate", "-m", tiny, "-n", "12", "hello").stdout
    assert "layers  ██ 8" in piped.stderr
    assert "12 tokens" in piped.stderr
    assert "\x1b" not in piped.stderr


def test_json_is_one_object_without_loss_by_default(tiny: str) -> None:
    result = run("generate", "-m", tiny, "-n", "6", "hello", "--json")
    answer = json.loads(result.stdout)
    assert answer.keys() == JSON_FIELDS
    assert answer["mode"] == "lossless"
    assert answer["depths"] == [LAYERS] * 6
    assert answer["layers_executed"] > 0
    full = json.loads(run("generate", "-m", tiny, "-n", "6", "--mode", "full", "hello", "--json").stdout)
    assert full["token_ids"] == answer["token_ids"]
    assert "window is 0" in refused("generate", "-m", tiny, "--window", "0", "hello")
    assert "lookup is 99" in refused("generate", "-m", tiny, "--lookup", "99", "hello")


def test_json_at_full_depth(tiny: str) -> None:
    result = run("generate", "-m", tiny, "-n", "6", "--mode", "full", "hello", "--json")
    answer = json.loads(result.stdout)
    assert answer.keys() == JSON_FIELDS
    assert answer["mode"] == "full"
    assert answer["plan"] is None
    assert answer["depths"] == [LAYERS] * 6
    assert answer["layers_executed"] == answer["layers_full"] == LAYERS * 6
    assert answer["layer_speedup"] == 1.0
    assert answer["tokens_per_second"] == pytest.approx(1000 / answer["ms_per_token"])


def test_json_with_alpha_follows_the_rule(tiny: str) -> None:
    answer = json.loads(run("generate", "-m", tiny, "-n", "10", "--alpha", "0.9", "hello", "--json").stdout)
    plan = Plan.decay(LAYERS, "0.9")
    assert answer["mode"] == "decay"
    assert answer["depths"] == list(plan.depths(10))
    assert Plan.from_dict(answer["plan"]) == plan


def test_speedup_is_averaged_over_the_answer_unless_told(tiny: str) -> None:
    answer = json.loads(run("generate", "-m", tiny, "-n", "16", "--speedup", "1.3", "hello", "--json").stdout)
    assert answer["plan"]["schedule"]["horizon"] == 16
    assert answer["layer_speedup"] >= 1.3
    told = run("generate", "-m", tiny, "-n", "4", "--speedup", "1.3", "--over", "64", "hello", "--json")
    assert json.loads(told.stdout)["plan"]["schedule"]["horizon"] == 64


def test_mode_full_ignores_the_plan(tiny: str) -> None:
    words = ("generate", "-m", tiny, "-n", "8", "hello", "--json")
    full = json.loads(run(*words).stdout)
    forced = json.loads(run(*words, "--alpha", "0.8", "--mode", "full").stdout)
    assert forced["token_ids"] == full["token_ids"]
    assert forced["mode"] == "full"


def test_prompt_from_file_stdin_and_argument_agree(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("héllo", encoding="utf-8")
    words = ("generate", "-m", tiny, "-n", "5", "--json")
    answers = [run(*words, "héllo"), run(*words, "--prompt-file", str(file)), run(*words, "-", input="héllo")]
    assert len({tuple(json.loads(answer.stdout)["token_ids"]) for answer in answers}) == 1


def test_raw_leaves_out_the_template(tiny: str) -> None:
    words = ("generate", "-m", tiny, "-n", "1", "abc", "--json")
    assert json.loads(run(*words, "--raw").stdout)["prompt_tokens"] == 3
    assert json.loads(run(*words).stdout)["prompt_tokens"] > 3


def test_seeded_sampling_repeats(tiny: str) -> None:
    words = ("generate", "-m", tiny, "-n", "8", "--temperature", "1.5", "hello", "--json", "--seed")
    first, again, other = (json.loads(run(*words, seed).stdout) for seed in ("1", "1", "2"))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    assert first["seed"] == 1


def test_a_plan_file_is_used_and_its_weights_left_out_of_the_json(tiny: str, tmp_path: Path) -> None:
    model = load(tiny, device="cpu").model
    plan = Plan.decay(LAYERS, 0.9).with_model(identity(model, "tiny"))
    file = plan.save(tmp_path / "plan.json")
    result = run("generate", "-m", tiny, "-n", "6", "--plan", str(file), "hi", "--json")
    answer = json.loads(result.stdout)
    assert answer["depths"] == list(plan.depths(6))
    assert "fingerprint" not in answer["plan"]["model"]
    (line,) = result.stderr.splitlines()  # and no warning about other weights
    assert "by guess" in line


def test_other_weights_are_warned_about_on_one_line(tiny: str, tmp_path: Path) -> None:
    other = save_tiny_chat_model(tmp_path / "other", seed=1)
    plan = Plan.decay(LAYERS, 0.9, drop_order=[4, 3, 5, 2]).with_model(identity(load(other, device="cpu").model))
    result = run("generate", "-m", tiny, "-n", "3", "--plan", str(plan.save(tmp_path / "p.json")), "hi")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ")
    assert result.stderr.count("\n") == 1


# --- bad input ------------------------------------------------------------------------------------------------------


def test_a_temperature_that_is_too_high_is_told_the_bound(tiny: str) -> None:
    line = refused("generate", "-m", tiny, "--temperature", "1e9", "hi")
    assert "expected a number from 0 (greedy) to 1000000" in line


@pytest.mark.parametrize("alpha", ["0", "-0.5", "1.01", "nan", "x"])
def test_alpha_outside_its_range(alpha: str) -> None:
    assert "alpha" in refused("generate", "hi", "--alpha", alpha)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--plan", "p.json", "--alpha", "0.9"), "--plan and --alpha"),
        (("--alpha", "0.9", "--speedup", "1.2"), "--alpha and --speedup"),
        (("--warmup-tokens", "3"), "--warmup-tokens"),
        (("--core-head", "3"), "--core-head"),
        (("--over", "64", "--alpha", "0.9"), "--over"),
        (("--mode", "decay"), "--mode decay"),
        (("--mode", "lossy"), "--mode is 'lossy'; expected one of full, decay, lossless"),
        (("--speedup", "0.5"), "at least 1"),
        (("--alpha", "0.9", "--warmup-tokens", "-1"), "--warmup-tokens"),
        (("--max-new-tokens", "-3"), "--max-new-tokens"),
        (("--max-new-tokens", "0"), "--max-new-tokens"),
        (("--raw", "--system", "be brief"), "--raw"),
        (("--json", "--show-depth"), "--show-depth"),
        (("--plan", "no/such/plan.json"), "no plan at"),
        (("--plan", ""), "path is empty"),
        (("--prompt-file", "f"), "together"),
    ],
)
def test_contradictions_and_bad_values_are_refused_before_loading(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("depthdecay.model.load.load", lambda *_, **__: pytest.fail("the model was loaded first"))
    assert said in refused("generate", "hi", *words)


def test_speedup_that_cannot_be_reached(tiny: str) -> None:
    assert "cannot be reached" in refused("generate", "-m", tiny, "hi", "--speedup", "50")


def test_core_layers_that_leave_no_flex_layer(tiny: str) -> None:
    words = ("--alpha", "0.9", "--core-head", "4", "--core-tail", "4")
    assert "no flex layer" in refused("generate", "-m", tiny, "hi", *words)


def test_plan_of_another_model(tiny: str, tmp_path: Path) -> None:
    file = str(Plan.decay(30, 0.99).save(tmp_path / "plan.json"))
    line = refused("generate", "-m", tiny, "hi", "--plan", file)
    assert "30 layers" in line
    assert str(LAYERS) in line


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompts(prompt: str, tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text(prompt)
    assert "empty" in refused("generate", prompt)
    assert "empty" in refused("generate", "--prompt-file", str(file))
    assert "empty" in refused("generate", "-", input=prompt)


def test_no_prompt() -> None:
    assert "no prompt" in refused("generate")


def test_prompt_longer_than_the_context(tiny: str) -> None:
    assert "context holds 256" in refused("generate", "-m", tiny, "a" * 300)


def test_prompt_file_that_is_not_utf8_or_not_there(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("naïve".encode("latin-1"))
    assert "not UTF-8" in refused("generate", "--prompt-file", str(file))
    assert "not UTF-8" in refused("generate", "-", input=b"\xff\xfe")
    assert "cannot be read" in refused("generate", "--prompt-file", str(tmp_path / "none.txt"))
    assert "cannot be read" in refused("generate", "--prompt-file", str(tmp_path))


@pytest.mark.parametrize("command", ["generate", "info", "check"])
def test_unknown_model(command: str, tmp_path: Path) -> None:
    words = ("hi",) if command == "generate" else ()
    assert "no file or folder" in refused(command, *words, "-m", str(tmp_path / "nothing.gguf"))


def test_truncated_gguf(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 10, 10) + b"\x00" * 7)
    assert "cut.gguf" in refused("generate", "hi", "-m", str(file))


def test_model_that_is_no_causal_lm(tmp_path: Path) -> None:
    config = tiny_config("bert")
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    assert "not a causal language model" in refused("generate", "hi", "-m", str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU here")
def test_cuda_where_there_is_none(tiny: str) -> None:
    assert ": --device is 'cuda', but no CUDA GPU " in refused("generate", "hi", "-m", tiny, "--device", "cuda")


def test_what_loading_refuses_is_told_with_flags(tiny: str, tmp_path: Path) -> None:
    assert ": --device is 'toaster'; expected cpu, " in refused("generate", "hi", "-m", tiny, "--device", "toaster")
    assert ": --dtype is 'int3'; expected auto, " in refused("info", "-m", tiny, "--dtype", "int3")
    own_code = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "configuration_x.X"}}
    (tmp_path / "config.json").write_text(json.dumps(own_code))
    (tmp_path / "configuration_x.py").touch()
    (tmp_path / "model.safetensors").touch()
    assert "trust it and set --trust-remote-code" in refused("check", "-m", str(tmp_path))


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    assert "put its tokenizer.json next to the weights" in refused("generate", "hi", "-m", str(tmp_path))


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("depthdecay.model.load.load", interrupt)
    result = run("generate", "hi")
    assert result.exit_code == 130
    assert result.stderr == "depthdecay: interrupted\n"


# --- chat -----------------------------------------------------------------------------------------------------------


def test_chat_reads_a_turn_a_line(tiny: str) -> None:
    result = run("chat", "-m", tiny, "-n", "3", "--stop", "\n", input="hello\n\n/help\n/exit\nnever\n")
    assert result.exit_code == 0, result.output
    assert "/reset" in result.stderr
    assert result.stdout.count("\n") == 1


def test_chat_re_reads_the_whole_conversation(tiny: str) -> None:
    loaded = load(tiny, device="cpu")
    engine = Engine(loaded.model, loaded.tokenizer, Plan.decay(LAYERS, 0.9))
    conversation = Conversation(engine, "be brief", {"max_new_tokens": 4}, show_depth=False, quiet=True)
    conversation.answer("one")
    conversation.answer("two")
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "user", "assistant"]
    # A fresh engine gives the same second answer from the text alone: no decayed KV cache was reused.
    fresh = Engine(loaded.model, loaded.tokenizer, Plan.decay(LAYERS, 0.9))
    assert fresh.generate([conversation.messages[:4]], 4)[0].text == conversation.messages[4]["content"]
    conversation.reset()
    assert [m["role"] for m in conversation.messages] == ["system"]


def test_chat_says_when_the_conversation_is_too_long(tiny: str) -> None:
    result = run("chat", "-m", tiny, "-n", "2", input="a" * 300 + "\n")
    assert result.exit_code == 2
    assert "/reset" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_refused_turn_leaves_no_trace(tiny: str) -> None:
    loaded = load(tiny, device="cpu")
    engine = Engine(loaded.model, loaded.tokenizer)
    conversation = Conversation(engine, None, {"max_new_tokens": 2}, show_depth=False, quiet=True)
    with pytest.raises(DepthDecayError, match="/reset"):
        conversation.answer("a" * 300)
    assert conversation.messages == []


def test_chat_needs_a_template(tmp_path: Path) -> None:
    assert "chat template" in refused("chat", "-m", save_tiny_chat_model(tmp_path, chat=False), input="hi\n")


# --- info -----------------------------------------------------------------------------------------------------------


def test_info_tells_sizes_and_savings(tiny: str) -> None:
    facts = json.loads(run("info", "-m", tiny, "--speedup", "1.3", "--over", "32", "--json").stdout)
    model = load(tiny, device="cpu").model
    assert facts["num_layers"] == LAYERS
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["layer_bytes"][0] == sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    assert facts["head_bytes"] == model.lm_head.weight.numel() * 4
    assert facts["context_limit"] == 256
    assert facts["default_ladder"]["core"] == [0, 1, LAYERS - 2, LAYERS - 1]
    savings = facts["savings"]
    assert savings["tokens"] == 32
    assert 1 < savings["cost_speedup"] < savings["layer_speedup"]
    assert savings["average_depth"] == pytest.approx(LAYERS / savings["layer_speedup"])
    assert sum(row["tokens"] for row in savings["depth_table"]) == 32


def test_info_promises_the_cache_that_the_engine_saves(tiny: str) -> None:
    savings = json.loads(run("info", "-m", tiny, "--alpha", "0.95", "--tokens", "24", "--json").stdout)["savings"]
    loaded = load(tiny, device="cpu")
    engine = Engine(loaded.model, None, Plan.decay(LAYERS, "0.95"), graphs=False)
    result = engine.generate([[5] * savings["prompt_tokens"]], 24)[0]
    assert savings["cache_bytes_saved"] == result.cache_bytes_saved > 0
    assert savings["cache_bytes_full"] == result.cache_bytes + result.cache_bytes_saved


def test_info_for_people_is_plain_when_piped(tiny: str) -> None:
    result = run("info", "-m", tiny, "--alpha", "0.95")
    assert result.exit_code == 0
    assert "LlamaForCausalLM" in result.stdout
    assert "layer speed-up" in result.stdout
    assert "\nladder                 middle-out, a guess: core 0, 1, " in result.stdout
    assert "default ladder" not in result.stdout  # the plan has its own
    assert "\x1b" not in result.stdout
    assert result.stderr.startswith("warning: layers are dropped from the middle outwards, by guess")


@pytest.mark.usefixtures("cache")
def test_info_shows_the_ladder_that_a_speed_up_would_take() -> None:
    by_speedup = run("info", "--device", "cpu", "--speedup", "1.1")
    assert by_speedup.exit_code == 0, by_speedup.output
    ladder = next(line for line in by_speedup.stdout.splitlines() if line.startswith("ladder"))
    assert "calibrated: core 0, " in ladder
    assert "middle-out" not in by_speedup.stdout
    plain = run("info", "--device", "cpu")
    assert ladder.partition("calibrated")[2] in plain.stdout


# --- drawing and options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 7, 128, 5000])
@pytest.mark.parametrize("width", [12, 40, 100])
def test_depth_curve_fits_the_width(tokens: int, width: int) -> None:
    depths = Plan.decay(30, 0.99).depths(tokens)
    lines = depth_curve(depths, 30, depths[-1], width).plain.split("\n")
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("30 │")
    assert "·" not in lines[5]


def test_legend_names_first_and_last_depth() -> None:
    legend = depth_legend(Plan.decay(80, 0.99).depths(300), 80, 4).plain
    assert " 80 " in legend
    assert " 4 " in legend


def test_depth_colours_differ_and_are_valid() -> None:
    styles = [depth_style(depth, 4, 30) for depth in range(4, 31)]
    assert len(set(styles)) == len(styles)
    assert depth_style(30, 30, 30) == styles[-1]
    Console().get_style(styles[0])


def test_plan_options_describe_the_same_plan_as_the_library() -> None:
    options = PlanOptions(speedup="1.25", over=64, warmup_tokens=4, core_head=3, core_tail=1, min_layers=5)
    made = options.settings().by_rule(28)
    expected = Plan.for_speedup(28, 1.25, over_tokens=64, warmup_tokens=4, core_head=3, core_tail=1, min_layers=5)
    assert made == expected
    assert plan_dict(expected) == expected.to_dict()


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_in_a_terminal_show_depth_colours_and_draws(tiny: str) -> None:
    import pty

    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "depthdecay", "generate", "-m", tiny, "-n", "8", "--alpha", "0.9", "--show-depth"]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        [*words, "hello"], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    output = b""
    try:
        while data := os.read(ours, 4096):
            output += data
    except OSError:
        pass  # on Linux: the other side is closed
    finally:
        os.close(ours)
    text = output.decode("utf-8", "replace")
    assert process.wait() == 0, text
    assert "\x1b[38;" in text
    assert "│" in text
    assert "layer speed-up" in text


def test_lossless_says_what_full_depth_says_and_what_it_took(tiny: str) -> None:
    full = json.loads(run("generate", "-m", tiny, "-n", "24", "--mode", "full", "--json", "hello").stdout)
    lossless = json.loads(run("generate", "-m", tiny, "-n", "24", "--mode", "lossless", "--json", "hello").stdout)
    assert lossless["token_ids"] == full["token_ids"]
    assert lossless["text"] == full["text"]
    assert full["lossless"] is None
    account = lossless["lossless"]
    assert len(account["draft_depths"]) == len(lossless["token_ids"])
    assert account["accepted"] <= account["drafted"]
    assert account["verifications"] >= 1
    shown = run("chat", "-m", tiny, "--mode", "lossless", "-n", "8", "--show-depth", input="hi\n")
    assert shown.exit_code == 0, shown.output
    assert "8 tokens in " in shown.stderr
    assert "tokens per pass" in shown.stderr
    assert "layer speed-up" not in shown.stderr


# --- calibration ----------------------------------------------------------------------------------------------------


SMALLEST = (
    *("--fit-prompts", "8", "--held-out-prompts", "4", "--new-tokens", "8", "--width", "1"),
    *("--repair-rank", "2", "--repair-neurons", "0"),
)


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"question": f"what is {i} and {i + 3}?"}) + "\n" for i in range(40)))
    return str(file)


def test_a_plan_is_calibrated_used_rescheduled_and_evaluated(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "plan")
    arguments = ("calibrate", "-m", tiny, "--prompts", prompts_file, "--out", folder, *SMALLEST)
    result = run(*arguments, "--speedup", "1.2", "--also", "1.1", "--lossless", "--drafter", "layers")
    assert result.exit_code == 0, result.output
    assert "held out: KL" in result.stdout
    assert "promise" not in result.stdout  # the goal was a speed-up, not a quality budget
    files = {file.name for file in (tmp_path / "plan").iterdir()}
    assert files == {"plan.json", "repairs.safetensors", "calibration.json", "report.html", "speedup-1.1", "lossless"}
    figures = json.loads((tmp_path / "plan" / "calibration.json").read_text())
    assert {"command", "machine", "versions", "promise", "repaired", "plain", "choices"} <= figures.keys()
    assert str(tmp_path) not in (tmp_path / "plan" / "report.html").read_text()
    answer = json.loads(run("generate", "-m", tiny, "--plan", folder, "-n", "8", "--json", "hello").stdout)
    assert answer["mode"] == "decay"
    assert answer["plan"]["repairs"] == "repairs.safetensors"
    assert min(answer["depths"]) < LAYERS
    faster = run("generate", "-m", tiny, "--plan", folder, "--speedup", "1.1", "-n", "8", "--json", "hello")
    assert json.loads(faster.stdout)["layer_speedup"] >= 1.1
    assert "with --plan" in refused(
        "generate", "-m", tiny, "--plan", folder, "--speedup", "1.1", "--core-head", "1", "x"
    )
    exact = run("generate", "-m", tiny, "--plan", folder, "--mode", "lossless", "-n", "8", "--json", "hello")
    full = run("generate", "-m", tiny, "--mode", "full", "-n", "8", "--json", "hello")
    assert json.loads(exact.stdout)["token_ids"] == json.loads(full.stdout)["token_ids"]
    assert json.loads(exact.stdout)["plan"]["rule"] == "constant"  # the drafting plan
    data = tmp_path / "test.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 3)
    measured = run(
        "eval", "-m", tiny, "--plan", folder, "--task", "gsm8k", "--data", str(data), "-n", "8", "--speedups", "1.1"
    )
    assert measured.exit_code == 0, measured.output


def test_a_plan_to_draft_with_is_calibrated_alone(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "plan")
    by_layers = ("--lossless", "--drafter", "layers")
    result = run("calibrate", "-m", tiny, "--prompts", prompts_file, "--out", folder, *SMALLEST, *by_layers)
    assert result.exit_code == 0, result.output
    assert "draft accuracy on held-out text, at " in result.stdout
    assert "KL" not in result.stdout  # nobody decodes with it
    exact = run("generate", "-m", tiny, "--plan", folder, "--mode", "lossless", "-n", "8", "--json", "hello")
    assert json.loads(exact.stdout)["plan"]["repairs"] == "repairs.safetensors"


def test_drafts_by_layers_that_do_not_pay_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = replace(Plan.constant(LAYERS, 4), folder=tmp_path)
    told = []
    for gain in (expected(4, 0.9, 0.5), expected(4, 0.3, 0.5)):
        drafting = {"drafting": {**asdict(gain), "pays": gain.pays}}
        monkeypatch.setattr("depthdecay.calibration.calibrate.calibrate", lambda *_, **__: plan)
        monkeypatch.setattr("depthdecay.calibration.calibrate.figures_of", lambda _, found=drafting: found)
        told.append(" ".join(run("calibrate", "--lossless", "--out", str(tmp_path)).stdout.split()))
    assert "held-out text, at 4 layers: 90.0% a draft costs 0.50 of a step; 1." in told[0]
    assert " expected in lossless mode, with windows of " in told[0]
    assert "prompt lookup" not in told[0]
    assert "so drafts by layers do not pay: prompt lookup alone will run" in told[1]


def test_lossless_is_benched_on_prompts(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    file = tmp_path / "lossless.json"
    arguments = ("bench", "-m", tiny, "--mode", "lossless", "--prompts", prompts_file, "--new-tokens", "8")
    result = run(*arguments, "--limit", "2", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "lossless, guessed layers" in result.stdout
    rows = json.loads(file.read_text())["lossless_rows"]
    assert all(row["answers_that_differ"] == 0 for row in rows)
    needs = "needs --mode lossless, and --prompts"
    assert needs in refused("bench", "--mode", "lossless", "--shape", "tiny", "--prompts", prompts_file)
    assert needs in refused("bench", "--prompts", prompts_file)
    assert "--compared is -1" in refused(*arguments, "--compared", "-1")
    assert "--peers contains 'beams'" in refused(*arguments, "--peers", "generate,beams")
    assert needs in refused("bench", "--peers", "none")


def test_lossless_is_benched_on_a_tasks_questions(tiny: str, tmp_path: Path) -> None:
    data, file = tmp_path / "test.jsonl", tmp_path / "lossless.json"
    data.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(3)))
    arguments = ("bench", "-m", tiny, "--mode", "lossless", "--prompts", str(data), "--new-tokens", "4")
    result = run(*arguments, "--task", "gsm8k", "--limit", "2", "--peers", "none", "--json", str(file))
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["settings"]["prompts"] == 2
    assert not any(row["method"].startswith("transformers") for row in found["lossless_rows"])
    assert "no task 'sums'" in refused(*arguments, "--task", "sums")


def test_eval_knows_lossless_as_a_mode() -> None:
    assert "expected lossless" in refused("eval", "--task", "gsm8k", "--mode", "decay")
    assert "no --methods" in refused("eval", "--task", "gsm8k", "--mode", "lossless", "--methods", "full")


@pytest.mark.parametrize(
    ("kind", "ignored", "fitting"),
    [
        (["--shape", "tiny"], ["--quantize", "int4"], "a --model on a CPU"),
        (["--shape", "tiny"], ["--threads", "2"], "a --model on a CPU"),
        (["--shape", "tiny"], ["--limit", "5"], "--mode lossless and --prompts"),
        (["--methods", "full"], ["--compared", "5"], "--mode lossless and --prompts"),
        ([], ["--limit", "20"], "--mode lossless and --prompts"),  # the default value is refused too
        ([], ["--compared", "0"], "--mode lossless and --prompts"),
        ([], ["--no-compile"], "--shape"),
        (["--mode", "lossless", "--shape", "tiny"], ["--limit", "5"], "--mode lossless and --prompts"),
        (["--mode", "lossless", "--shape", "tiny"], ["--peers", "none"], "--mode lossless and --prompts"),
        (["--mode", "lossless", "--shape", "tiny"], ["--plan", "default"], "--mode lossless and --prompts"),
        (["--mode", "lossless", "--shape", "tiny"], ["--max-new-tokens", "8"], "--mode lossless and --prompts"),
        (["--mode", "lossless", "--prompts", "p.txt"], ["--prompt-tokens", "8"], "--mode lossless and --shape"),
        (["--mode", "lossless", "--prompts", "p.txt"], ["--speedup", "1.1"], "--shape"),
        (["--mode", "lossless", "--prompts", "p.txt"], ["--rounds", "3"], "--shape"),
        (["--mode", "lossless", "--prompts", "p.txt"], ["--batch", "4"], "--shape"),
        (["--mode", "lossless", "--prompts", "p.txt"], ["--methods", "full"], "--shape"),
        (["--mode", "lossless", "--prompts", "p.txt"], ["--threads", "2"], "a --model on a CPU"),
    ],
)
def test_an_option_that_a_bench_would_ignore_is_refused(kind: list[str], ignored: list[str], fitting: str) -> None:
    line = refused("bench", "--device", "cpu", *kind, *ignored)
    assert f"{ignored[0].replace('--no-', '--')} has no effect in a benchmark of " in line
    assert f"use it with {fitting}" in line or f" or with {fitting}" in line


def test_methods_of_bench_may_have_spaces_between_them() -> None:
    # The help lists them with spaces, as a narrow terminal cannot break the list otherwise.
    line = refused("bench", "--device", "cpu", "--shape", "tiny", "--methods", "full, decay, other")
    assert "'other'" in line


def test_every_option_of_bench_is_of_some_kind() -> None:
    from typer.main import get_command

    bench = get_command(app).commands["bench"]  # type: ignore[attr-defined]
    known = {"device", "json_file", "help"}.union(*(kind.takes for kind in KINDS))
    assert {parameter.name for parameter in bench.params} - {"help"} == known - {"help"}


def test_an_assistant_that_no_peer_uses_is_refused(prompts_file: str) -> None:
    words = (
        "bench",
        "--mode",
        "lossless",
        "--prompts",
        prompts_file,
        "--peers",
        "generate",
        "--assistant",
        "some/model",
    )
    assert "--peers generate leaves out" in refused(*words)


def test_the_passes_of_a_shape_are_timed(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    result = run("bench", "--mode", "lossless", "--shape", "tiny", "--device", "cpu", "--json", str(file))
    assert result.exit_code == 0, result.output
    costs = json.loads(file.read_text())["step_costs"]
    assert list(costs["verifications"]) == ["2", "4", "8", "16"]
    assert all(row["speedup"] >= 1 for row in costs["speedups"])
    assert {row["acceptance"] for row in costs["speedups"]} == {0.7, 0.8, 0.9, 0.95}


def test_a_budget_that_no_plan_keeps_saves_nothing(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    arguments = ("calibrate", "-m", tiny, "--prompts", prompts_file, "--out", str(folder), *SMALLEST)
    result = run(*arguments, "--max-kl", "1e-12")
    assert result.exit_code == 2
    assert "the nearest is" in result.stderr.splitlines()[-1]
    assert not (folder / "plan.json").exists()
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--max-kl", "0.1", "--speedup", "1.2"), "give one of"),
        (("--max-kl", "0"), "above 0"),
        (("--speedup", "1"), "above 1"),
        (("--speedup", "fast"), "expected a number"),
        (("--also", "1.1,x"), "expected a number"),
        (("--fit-prompts", "3"), "--fit-prompts is 3"),
        (("--repair-rank", "0"), "--repair-rank is 0"),
        (("--minutes", "0"), "--minutes is 0"),
        (("--learn", "-1"), "--learn is -1"),
        (("--prompts", "nowhere.jsonl"), "cannot be read"),
        (("--task", "chess"), "no task 'chess'"),
    ],
)
def test_calibrate_refuses_before_a_model_is_loaded(
    arguments: tuple[str, ...], complaint: str, prompts_file: str, tmp_path: Path
) -> None:
    given = ("calibrate", "-m", "no/such-model", "--prompts", prompts_file, "--out", str(tmp_path / "x"), *arguments)
    assert complaint in refused(*given)


@pytest.mark.parametrize("setting", ["none", "int8", "int4"])
def test_generate_in_few_bits(tiny: str, setting: str) -> None:
    result = run("generate", "-m", tiny, "--device", "cpu", "--quantize", setting, "-n", "4", "--json", "hello")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["token_ids"]) == 4


def test_settings_of_the_cpu_are_checked_before_a_model_is_loaded() -> None:
    for command in (("generate", "x"), ("chat",), ("info",), ("bench", "--device", "cpu")):
        assert "expected none, int8 or int4" in refused(*command, "--quantize", "int3")
        assert "--threads is 0" in refused(*command, "--threads", "0")


def test_info_says_how_passes_run(tiny: str) -> None:
    facts = json.loads(run("info", "-m", tiny, "--device", "cpu", "--quantize", "int4", "--json").stdout)
    assert facts["passes"]["quantized"]["setting"] == "int4"
    assert facts["passes"]["quantized"]["matrices"] == {"4 bits": 7 * 8, "8 bits": 1}
    assert "56 matrices in 4 bits" in run("info", "-m", tiny, "--device", "cpu", "--quantize", "int4").stdout
    assert "weights not quantized" in run("info", "-m", tiny, "--device", "cpu").stdout


def test_fidelity_is_measured_and_written(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "fidelity.json"
    result = run("info", "-m", tiny, "--device", "cpu", "--fidelity", "2", "--json-file", str(file))
    assert result.exit_code == 0, result.output
    assert "fidelity of int8" in result.stdout
    settings = json.loads(file.read_text())["settings"]
    assert 0 <= settings["int8"]["kl"] < settings["int4"]["kl"]
    assert "without --fidelity" in refused("info", "-m", tiny, "--json-file", str(file))


def test_bench_of_a_model_on_a_cpu_takes_every_precision(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    arguments = ("bench", "-m", tiny, "--device", "cpu", "--new-tokens", "4", "--rounds", "1", "--json", str(file))
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    titles = {row["title"] for row in json.loads(file.read_text())["rows"]}
    assert {"generate float32", "full float32", "full bfloat16", "decay int8", "decay int4"} <= titles
