"""`depthdecay generate`: answer one prompt, as streamed text or as one JSON object."""

from __future__ import annotations

import itertools
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthdecay.cli import options as opt
from depthdecay.cli.show import TextPrinter, print_account, working
from depthdecay.errors import DepthDecayError
from depthdecay.files import read_bytes

if TYPE_CHECKING:
    from depthdecay.engine.engine import Engine
    from depthdecay.engine.result import Piece, Result, Stream
    from depthdecay.plan.plan import Plan


@opt.grouped()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads standard input.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="Read the prompt from a file.")] = None,
    *,
    model: opt.ModelOptions,
    plan: opt.PlanOptions,
    answer: opt.AnswerOptions,
    allow_other_weights: opt.AllowOtherWeights = False,
    system: opt.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: the model continues the text.")] = False,
    show_depth: opt.ShowDepth = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Answer a prompt, losslessly by default. --plan, --alpha or --speedup trade quality for more speed."""
    if raw and system is not None:
        raise DepthDecayError("--raw and --system were given together; a system prompt needs the chat template")
    if as_json and show_depth:
        raise DepthDecayError("--json and --show-depth were given together; the JSON already contains the depths")
    text = read_prompt(prompt, prompt_file)
    loaded, engine = opt.open_engine(
        model,
        plan,
        answer.max_new_tokens,
        answer.mode,
        quiet=quiet or as_json,
        allow_other_weights=allow_other_weights,
    )
    stream = engine.stream(text, system=system, chat=False if raw else None, **vars(answer))
    if as_json:
        for _ in stream:
            pass
        print(json.dumps(account(stream.result, loaded.name, engine.plan), ensure_ascii=False))
        return
    shallowest = opt.shallowest_depth(engine, answer.max_new_tokens)
    stream_text(engine, stream, shallowest, show_depth=show_depth, quiet=quiet)
    if not quiet:
        print_account(stream.result, shallowest, show_depth=show_depth)


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt from the argument, a file or stdin; always UTF-8."""
    if prompt is not None and file is not None:
        raise DepthDecayError("a prompt and --prompt-file were given together; use one")
    if file is not None:
        where = f"the prompt file '{file}'"
        content = read_bytes(file, where)
    elif prompt == "-":
        content, where = sys.stdin.buffer.read(), "standard input"
    elif prompt is None:
        raise DepthDecayError("no prompt was given; pass it as an argument, or use --prompt-file, or - for stdin")
    else:
        content, where = prompt.encode("utf-8", "surrogateescape"), "the prompt"
    text = decode_utf8(content, where)
    if not text.strip():
        raise DepthDecayError(f"{where} is empty; give at least one word")
    return text


def decode_utf8(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DepthDecayError(f"{where} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def stream_text(
    engine: Engine,
    stream: Stream,
    shallowest: int,
    *,
    show_depth: bool = False,
    quiet: bool = False,
    heard: list[str] | None = None,
) -> None:
    """Print the pieces as they come, and append them to `heard`, so that an interrupted answer is kept too.

    The first piece waits for the prefill, and on CUDA for compilation and graph capture.
    """
    printer = TextPrinter(engine.stack.num_layers, shallowest, colour=show_depth)
    started = "compiling, then reading the prompt …" if engine.compiled else "reading the prompt …"
    try:
        with working(started, quiet=quiet or not printer.console.is_terminal):
            first: list[Piece] = list(itertools.islice(stream, 1))
        for piece in itertools.chain(first, stream):
            printer.write(piece)
            if heard is not None:
                heard.append(str(piece))
    finally:
        printer.end()


def account(result: Result, model: str, plan: Plan | None) -> dict[str, Any]:
    """Everything about one answer, as `--json` prints it."""
    ms_per_token = result.ms_per_token or None  # an answer of one token has no decode step to time
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "depths": result.depths,
        "layers_executed": result.layers_executed,
        "layers_full": result.layers_full,
        "layer_speedup": result.layer_speedup,
        "ms_per_token": ms_per_token,
        "tokens_per_second": 1000 / ms_per_token if ms_per_token else None,
        "mode": result.mode,
        "plan": opt.plan_dict(plan) if plan is not None and result.mode != "full" else None,
        "finish_reason": result.finish_reason,
        "seconds": result.seconds,
        "prompt_tokens": result.prompt_tokens,
        "model": model,
        "seed": result.seed,
        "cache_bytes": result.cache_bytes,
        "cache_bytes_saved": result.cache_bytes_saved,
        "lossless": lossless_account(result) if result.mode == "lossless" else None,
    }


def lossless_account(result: Result) -> dict[str, Any]:
    """Cost and yield of drafting. `draft_depths` says what drafted each token, as in `Result`."""
    return {
        "drafted": result.drafted,
        "accepted": result.accepted,
        "acceptance": result.acceptance,
        "verifications": result.verifications,
        "passes_per_token": result.passes_per_token,
        "draft_depths": result.draft_depths,
    }
