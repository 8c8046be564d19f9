"""Flags: the same names in all commands, and library errors worded with the flags that were typed."""

from __future__ import annotations

from typer.main import get_command

from depthdecay.cli import app
from depthdecay.cli.flags import by_new_names, in_flags
from depthdecay.errors import ArgumentError

COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


def test_parameters_become_the_commands_own_flags() -> None:
    error = ArgumentError("give one of max_kl and speedup", "max_kl", "speedup")
    assert in_flags(error, COMMANDS["calibrate"]) == "give one of --max-kl and --speedup"
    assert in_flags(ArgumentError("over_tokens is 0", "over_tokens"), COMMANDS["eval"]) == "--over is 0"


def test_only_whole_names_that_the_command_has_are_changed() -> None:
    error = ArgumentError("batch is 0: a batch_size, or batches, of magic", "batch", "magic")
    assert in_flags(error, COMMANDS["eval"]) == "--batch is 0: a batch_size, or batches, of magic"
    already = ArgumentError("--limit is 0", "--limit")
    assert in_flags(already, COMMANDS["eval"]) == "--limit is 0"


def test_options_have_one_name_in_all_commands() -> None:
    names = {name: {option for p in command.params for option in p.opts} for name, command in COMMANDS.items()}
    old = {"--new-tokens", "--max-tokens", "--output"}
    assert not old & set().union(*names.values())
    answering = ("generate", "chat", "demo", "check", "bench", "bench-vllm", "calibrate", "analyze", "eval", "loadtest")
    for name in answering:
        assert {"--max-new-tokens", "-n"} <= names[name], name
    for name in ("bench", "bench-vllm", "eval", "loadtest", "info"):
        assert "--json-file" in names[name], name


def test_commands_know_the_names_that_their_options_had() -> None:
    known = {"--max-new-tokens", "-n", "--json-file"}
    typed = ["--new-tokens", "8", "--max-tokens=9", "--json", "x.json", "-o", "y.json", "--json=z.json"]
    new = ["--max-new-tokens", "8", "--max-new-tokens=9", "--json-file", "x.json", "--json-file", "y.json"]
    assert by_new_names(typed, known) == [*new, "--json-file=z.json"]
    assert by_new_names(["--json", "--output"], {"--json", "--json-file"}) == ["--json", "--json-file"]
    assert by_new_names(["--new-tokens"], {"--prompts"}) == ["--new-tokens"]
    command = COMMANDS["bench"]
    context = command.make_context("bench", ["--shape", "tiny", "--new-tokens", "8", "--json", "x.json"])
    assert (context.params["new_tokens"], context.params["json_file"]) == (8, "x.json")
