"""Flag names: accepts those of earlier releases, and puts flags for Python parameters into the library's errors."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand

from depthdecay.errors import ArgumentError

# Library parameters whose option has another name.
_OTHER_NAMES = {"over_tokens": "over", "result_file": "json_file", "answers_file": "answers"}

# Earlier option names, from when commands did not agree on them.
_OLD_NAMES = {
    **dict.fromkeys(("--new-tokens", "--max-tokens"), "--max-new-tokens"),
    **dict.fromkeys(("--json", "--output", "-o"), "--json-file"),
}


class Command(TyperCommand):
    """A command that also accepts its options under their earlier names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)}
        return super().parse_args(ctx, by_new_names(args, known))


def by_new_names(words: Sequence[str], options: Collection[str]) -> list[str]:
    """The words typed, with earlier option names replaced by the current ones where the command has those."""
    renamed = []
    for word in words:
        name, equals, value = word.partition("=")
        new = _OLD_NAMES.get(name)
        renamed.append(f"{new}{equals}{value}" if new in options and name not in options else word)
    return renamed


def in_flags(error: ArgumentError, command: Any) -> str:
    """The message with each parameter's name replaced by its flag, if the command has one."""
    parameters = () if command is None else command.params
    options = [option for parameter in parameters for option in parameter.opts if option.startswith("--")]
    flags = {option.removeprefix("--").replace("-", "_"): option for option in options}
    flags |= {parameter.name: parameter.opts[0] for parameter in parameters if parameter.name not in flags}
    message = str(error)
    for name in error.parameters:
        flag = flags.get(name, flags.get(_OTHER_NAMES.get(name)))
        if flag is not None and flag.startswith("--"):
            message = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", flag, message)
    return message
