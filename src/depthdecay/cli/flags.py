"""Errors of the library name Python's parameters; whoever typed a command knows them by their flags."""

from __future__ import annotations

import re
from typing import Any

from depthdecay.errors import ArgumentError

# Parameters of the library that options call otherwise.
_OTHER_NAMES = {"over_tokens": "over", "result_file": "json_file", "answers_file": "answers"}


def in_flags(error: ArgumentError, command: Any) -> str:
    """The message with each parameter's flag in the place of its name, where the command has one."""
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
