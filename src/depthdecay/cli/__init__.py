"""The command line: registers the sub-commands, and turns every error into one line and an exit code."""

from __future__ import annotations

import errno
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from depthdecay.cli.analyze import analyze
from depthdecay.cli.bench import bench
from depthdecay.cli.bench_vllm import bench_vllm
from depthdecay.cli.calibrate import calibrate
from depthdecay.cli.chat import chat
from depthdecay.cli.check import check
from depthdecay.cli.demo import demo
from depthdecay.cli.doctor import doctor
from depthdecay.cli.eval import eval_command
from depthdecay.cli.export import export
from depthdecay.cli.flags import Command, in_flags
from depthdecay.cli.generate import generate
from depthdecay.cli.info import info
from depthdecay.cli.lm_eval import PASS_THROUGH, lm_eval
from depthdecay.cli.loadtest import loadtest
from depthdecay.cli.serve import serve
from depthdecay.cli.vllm import app as vllm
from depthdecay.errors import ArgumentError, DepthDecayError

__all__ = ["app", "main"]

_PACKAGE = str(Path(__file__).resolve().parents[1])


class _OneLineErrors(TyperGroup):
    """Bad input exits with one line and code 2, Ctrl-C with 130; only a bug of ours shows a traceback."""

    def invoke(self, ctx: Any) -> Any:
        # Show only our own warnings: those of libraries are about code that the user did not write.
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except ArgumentError as error:
                _fail(in_flags(error, self.commands.get(ctx.invoked_subcommand or "")))
            except DepthDecayError as error:
                _fail(str(error))
            except KeyboardInterrupt as error:
                _fail("; ".join(("interrupted", *map(str, error.args))), code=130)
            except OSError as error:
                if error.errno == errno.EPIPE:
                    raise  # the reader closed the pipe, as `| head` does: typer exits quietly
                _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
            except RuntimeError as error:
                if type(error).__name__ != "OutOfMemoryError":
                    raise
                _fail("the device is out of memory; use a smaller model, a 16-bit --dtype, or --device cpu")


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"depthdecay: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(code)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
    if filename.startswith(_PACKAGE):
        print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _print_version(wanted: bool) -> None:
    if wanted:
        from depthdecay import __version__

        print(f"depthdecay {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="depthdecay",
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def depthdecay(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Faster decoding for Hugging Face models: lossless speculative decoding, or fewer layers for later tokens."""


app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command(cls=Command)(serve)
app.command(cls=Command)(loadtest)
app.command(cls=Command)(info)
app.command(cls=Command)(check)
app.command(cls=Command)(doctor)
app.command(cls=Command)(bench)
app.command(cls=Command)(calibrate)
app.command(cls=Command)(export)
app.command(cls=Command)(analyze)
app.command("eval", cls=Command)(eval_command)
app.command(cls=Command)(demo)
app.command("lm-eval", context_settings=PASS_THROUGH)(lm_eval)
app.add_typer(vllm)
app.command("bench-vllm", cls=Command)(bench_vllm)


def main() -> None:
    app(prog_name="depthdecay")
