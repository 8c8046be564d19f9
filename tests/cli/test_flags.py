"""Errors of the library, as whoever typed the command reads them."""

from __future__ import annotations

from typer.main import get_command

from depthdecay.cli import app
from depthdecay.cli.flags import in_flags
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
