"""`depthdecay lm-eval`: lm-evaluation-harness on our engine; the harness's own flags are passed through."""

from __future__ import annotations

import importlib.util
import io
import sys
import traceback
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthdecay.cli import options as opt
from depthdecay.errors import DepthDecayError, install, one_line
from depthdecay.integrations.lm_eval.gsm8k import find_files, read_problems
from depthdecay.library_internals import lm_eval_command_line

if TYPE_CHECKING:
    from argparse import Namespace

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}

_TASKS = Path(__file__).resolve().parents[1] / "integrations" / "lm_eval"
_ZERO_SHOT, _FEW_SHOT = "gsm8k_local", "gsm8k_local_8shot"


def lm_eval(
    context: typer.Context,
    model: opt.Model = opt.DEFAULT_MODEL,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    compile: opt.Compile = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    plan: opt.PlanPath = None,
    alpha: opt.Alpha = None,
    speedup: opt.Speedup = None,
    over: opt.Over = None,
    mode: opt.Mode = None,
    allow_other_weights: opt.AllowOtherWeights = False,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help=f"GSM8K's test.jsonl, for {_ZERO_SHOT} and {_FEW_SHOT}.")
    ] = None,
) -> None:
    """Run lm-evaluation-harness on a model, e.g. --tasks gsm8k --limit 50. Takes all of the harness's flags."""
    opt.PlanOptions(plan, alpha, speedup, over)  # bad values are refused here, before lm-eval's slow start
    if importlib.util.find_spec("lm_eval") is None:
        raise DepthDecayError(f"lm-eval needs lm-evaluation-harness, which is not installed; {install('eval')}")
    arguments = _parse(context.args)
    _choose_tasks(arguments, data)
    given: dict[str, Any] = {
        **{"plan": plan, "alpha": alpha, "speedup": speedup, "over": over, "mode": mode},
        **{"dtype": dtype, "compile": compile, "trust_remote_code": trust_remote_code},
        "allow_other_weights": allow_other_weights,
    }
    said = {
        name: value for name, value in given.items() if value is not None and (value is not False or name == "compile")
    }
    arguments.model = "depthdecay"
    arguments.model_args = {"pretrained": model} | (arguments.model_args or {}) | said
    _run(arguments, device)


def _parse(words: list[str]) -> Namespace:
    """lm-eval's own parser, which reads sys.argv. Of its page of usage, only the last line, the error, is kept."""
    before, sys.argv = sys.argv, ["lm-eval", "run", "--model", "depthdecay", *words]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return lm_eval_command_line().parse_args()
    except SystemExit:
        reason = (said.getvalue().strip().splitlines() or [""])[-1].partition("error: ")[2]
        raise DepthDecayError(f"lm-eval does not accept these arguments: {reason}") from None
    finally:
        sys.argv = before


def _choose_tasks(arguments: Namespace, data: str | None) -> None:
    """Register the local tasks, and check their files now: lm-eval would take long to get to them."""
    if data is not None and not arguments.tasks:
        arguments.tasks = [_ZERO_SHOT]
    local = {_ZERO_SHOT, _FEW_SHOT} & set(arguments.tasks or ())
    if data is not None and not local:
        raise DepthDecayError(f"--data is for the tasks {_ZERO_SHOT} and {_FEW_SHOT}; add one of them to --tasks")
    if not local:
        return
    test, train = find_files(data)
    if _ZERO_SHOT in local and arguments.num_fewshot:
        raise DepthDecayError(f"--num_fewshot was given, but {_ZERO_SHOT} is zero-shot; use {_FEW_SHOT}")
    if _FEW_SHOT in local and train is None:
        raise DepthDecayError(f"few-shot examples come from train.jsonl, which is not next to '{test}'; put it there")
    for file in (test, train):
        if file is not None:
            read_problems(file)
    arguments.metadata = (arguments.metadata or {}) | {"data": data}
    arguments.include_path = [str(_TASKS), *([arguments.include_path] if arguments.include_path else [])]


def _run(arguments: Namespace, device: str | None) -> None:
    from lm_eval.utils import setup_logging

    import depthdecay.integrations.lm_eval.model  # noqa: F401  registers itself: lm-eval does not search for models
    from depthdecay.model.devices import choose_device

    arguments.device = str(choose_device(device))  # lm-eval would default to cuda:0
    setup_logging()
    try:
        lm_eval_command_line().execute(arguments)
    except (ValueError, AssertionError, KeyError) as error:
        if isinstance(error, DepthDecayError) or not _raised_by_lm_eval(error):
            raise
        raise DepthDecayError(f"lm-eval: {one_line(error)}") from error


def _raised_by_lm_eval(error: Exception) -> bool:
    """Whether lm-eval itself refused something; an error from deeper down is a bug and should show its traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")).partition(".")[0] == "lm_eval"
