"""`depthdecay chat`: a conversation, prefilled again at full depth in every turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

from depthdecay.cli import options as opt
from depthdecay.cli.generate import decode_utf8, stream_text
from depthdecay.cli.show import err_console, print_account
from depthdecay.errors import DepthDecayError

if TYPE_CHECKING:
    from depthdecay.engine.engine import Engine

HELP = "/reset clears the conversation · /exit or Ctrl-D quits · Ctrl-C stops an answer"


@opt.grouped()
def chat(
    *,
    model: opt.ModelOptions,
    plan: opt.PlanOptions,
    answer: opt.AnswerOptions,
    allow_other_weights: opt.AllowOtherWeights = False,
    system: opt.System = None,
    show_depth: opt.ShowDepth = False,
    quiet: opt.Quiet = False,
) -> None:
    """Chat with a model. Piped input is one turn per line."""
    _, engine = opt.open_engine(
        model, plan, answer.max_new_tokens, answer.mode, quiet=quiet, allow_other_weights=allow_other_weights
    )
    conversation = Conversation(engine, system, vars(answer), show_depth=show_depth, quiet=quiet)
    talk(conversation, interactive=sys.stdin.isatty())


class Conversation:
    """The messages so far, and how to answer the next one.

    Only text is kept. Tokens generated below full depth have no keys and values in the dropped layers, so every turn
    prefills the whole conversation again at full depth, earlier answers included.
    """

    def __init__(
        self, engine: Engine, system: str | None, settings: dict[str, Any], *, show_depth: bool, quiet: bool
    ) -> None:
        if not getattr(engine.tokenizer, "chat_template", None):
            raise DepthDecayError(
                "this model has no chat template; use depthdecay generate, or an instruct version of the model"
            )
        self.engine = engine
        self.system = system
        self.settings = settings
        self.show_depth = show_depth
        self.quiet = quiet
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system is not None else []

    def answer(self, turn: str) -> None:
        """Print an answer and keep both messages. A turn refused or stopped before any output is forgotten."""
        messages = [*self.messages, {"role": "user", "content": turn}]
        stream = self.engine.stream(self._ids_within_context(messages), **self.settings)
        shallowest = opt.shallowest_depth(self.engine, self.settings["max_new_tokens"])
        heard: list[str] = []
        try:
            stream_text(self.engine, stream, shallowest, show_depth=self.show_depth, quiet=self.quiet, heard=heard)
            if not self.quiet:
                print_account(stream.result, shallowest, show_depth=self.show_depth)
        finally:
            if heard:
                self.messages = [*messages, {"role": "assistant", "content": "".join(heard)}]

    def _ids_within_context(self, messages: list[dict[str, str]]) -> list[int]:
        from depthdecay.model.prompts import chat_ids

        limit = self.engine.stack.context_limit()
        ids = chat_ids(self.engine.tokenizer, messages)
        if limit is not None and len(ids) >= limit:
            raise DepthDecayError(
                f"the conversation has {len(ids)} tokens, but the model's context holds {limit}; /reset clears it"
            )
        return ids


def talk(conversation: Conversation, *, interactive: bool) -> None:
    """Turn after turn until the input ends. An error prints one line at a terminal; in a pipe it ends the program."""
    console = err_console()
    if interactive and not conversation.quiet:
        console.print(Text(HELP, style="dim"))
    for line in _typed_lines() if interactive else _piped_lines():
        turn = line.strip()
        if turn in ("/exit", "/quit"):
            return
        if turn == "/reset":
            conversation.reset()
        elif turn == "/help":
            console.print(Text(HELP, style="dim"))
        elif turn.startswith("/") and " " not in turn and "/" not in turn[1:]:
            console.print(Text(f"unknown command {turn}; {HELP}", style="dim"))
        elif turn:
            try:
                conversation.answer(turn)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                console.print(Text("stopped", style="dim"))
            except DepthDecayError as error:
                if not interactive:
                    raise
                console.print(Text(str(error), style="red"))


def _typed_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history for input()
    while True:
        try:
            yield input("› ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit quits)")


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        yield decode_utf8(line, f"line {number} of standard input")
