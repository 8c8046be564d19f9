"""`depthdecay vllm serve`: vLLM's API server with depth decay; vLLM's own flags pass through."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from depthdecay.cli import options as opt
from depthdecay.errors import DepthDecayError, one_line
from depthdecay.files import expanded
from depthdecay.integrations.vllm import ARCHITECTURES, check_version
from depthdecay.plan.file import local_plan

app = typer.Typer(name="vllm", no_args_is_help=True, help="Run vLLM with depth decay or with a learned drafter.")


@app.callback()
def _vllm() -> None:
    """Run vLLM with depth decay or with a learned drafter."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@opt.grouped()
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hugging Face id, a folder or a .gguf file.")],
    *,
    plan: opt.PlanOptions,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="decay|lossless",
            help="lossless: vLLM's speculative decoding, with the plan's learned drafter.",
            rich_help_panel="Depth",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(metavar="N", help="Lossless mode: drafts per step (default: 3).", rich_help_panel="Depth"),
    ] = None,
    graphs: Annotated[
        bool,
        typer.Option("--graphs", help="Capture CUDA graphs by depth, with vLLM's compiler.", rich_help_panel="Depth"),
    ] = False,
    group_wait_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS", help="Let new requests wait up to so long to start together.", rich_help_panel="Depth"
        ),
    ] = None,
    allow_other_weights: opt.AllowOtherWeights = False,
) -> None:
    """Serve a model with vLLM, e.g. serve M --plan plan/ --tensor-parallel-size 2. Takes all flags of vllm serve."""
    if mode not in (None, "decay", "lossless"):
        raise DepthDecayError(f"--mode is {mode!r}; expected decay or lossless; for full depth, use vllm serve itself")
    if window is not None and mode != "lossless":
        raise DepthDecayError("--window is the number of drafts in lossless mode; add --mode lossless, or leave it out")
    if mode == "lossless" and (graphs or group_wait_ms is not None):
        raise DepthDecayError("--graphs and --group-wait-ms are for depth decay; in lossless mode vLLM is stock's own")
    if mode == "lossless":
        _serve(_lossless_words(context.args, model, plan, window, allow_other_weights))
        return
    if plan.path is not None and plan.speedup is not None:
        raise DepthDecayError("--plan and --speedup were given together; vLLM serves a plan as it was saved")
    if _given(context.args, "--hf-overrides", "--hf_overrides"):
        raise DepthDecayError("--hf-overrides is set by this command; to add to it, use vllm serve directly")
    check_version()
    from depthdecay.integrations.vllm.settings import KEY, server_depth
    from depthdecay.plan.identity import config_identity

    folder = model_folder(model)
    config = model_config(folder)
    settings = _depth_settings(plan, config.num_hidden_layers)
    if allow_other_weights:
        settings["allow_other_weights"] = True
    if group_wait_ms is not None:
        settings["group_wait_ms"] = group_wait_ms
    stock = (config.architectures or ["an unknown architecture"])[0]
    if stock not in ARCHITECTURES:
        raise DepthDecayError(f"{stock} does not support depth decay in vLLM; supported are {', '.join(ARCHITECTURES)}")
    server_depth(settings, config.num_hidden_layers).check_shape(config_identity(config, stock))
    overrides = {"architectures": [ARCHITECTURES[stock]], KEY: settings}
    chosen = _given(context.args, "--enforce-eager", "--compilation-config", "--compilation_config", "-cc")
    if graphs and chosen:
        raise DepthDecayError("--graphs sets --compilation-config; leave --enforce-eager and --compilation-config out")
    words = [] if chosen else ["--enforce-eager"]
    if graphs:
        words = _graph_words()
    names = _names(context.args, model, folder)
    _serve(["serve", folder, *words, *names, "--hf-overrides", json.dumps(overrides), *context.args])


def _graph_words() -> list[str]:
    """None for vLLM's own settings; the first model runner captures few sizes, without the compiler."""
    from depthdecay.integrations.vllm.refusals import GRAPHS
    from depthdecay.integrations.vllm.settings import CAPTURE_SIZES

    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
        return []
    return ["--compilation-config", json.dumps({**json.loads(GRAPHS), "cudagraph_capture_sizes": list(CAPTURE_SIZES)})]


def _lossless_words(
    given: list[str], model: str, plan: opt.PlanOptions, window: int | None, allow_other_weights: bool
) -> list[str]:
    """For the stock model, without the plug-in: drafting is one of vLLM's own settings."""
    if plan.path is None or plan.speedup is not None:
        raise DepthDecayError("--mode lossless drafts with a plan's learned drafter; give --plan, and no --speedup")
    if _given(given, "--speculative-config", "--speculative_config"):
        raise DepthDecayError("--speculative-config is set by --mode lossless; leave one of them out")
    if _given(given, "--pipeline-parallel-size", "--pipeline_parallel_size", "-pp"):
        raise DepthDecayError(
            "a drafter shares the model's embeddings, which vLLM does not support in a pipeline of several stages; "
            "leave --pipeline-parallel-size out"
        )
    opt.at_least(1, window=window)
    check_version()
    from depthdecay.integrations.eagle3.export import DRAFTS, cached_export

    stored = plan.load()
    assert stored is not None
    folder = model_folder(model)
    head = cached_export(
        stored,
        folder,
        trust_remote_code=_given(given, "--trust-remote-code", "--trust_remote_code"),
        allow_other_weights=allow_other_weights,
        progress=lambda message: print(message, flush=True),
    )
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": window or DRAFTS}
    return ["serve", folder, *_names(given, model, folder), "--speculative-config", json.dumps(drafts), *given]


def _names(given: list[str], model: str, folder: str) -> list[str]:
    """Keep the name that clients use if the weights are in another folder."""
    return [] if folder == model or _given(given, "--served-model-name") else ["--served-model-name", model]


def _given(words: list[str], *options: str) -> bool:
    return any(word.partition("=")[0] in options for word in words)


def model_folder(model: str) -> str:
    """The folder for vLLM: a GGUF file and the embedded model are converted, as for our own engine."""
    from depthdecay.model.load import embedded_file
    from depthdecay.plan.file import EMBEDDED_MODEL

    path = embedded_file() if model == EMBEDDED_MODEL else expanded(model)
    if path.suffix == ".gguf" and path.is_file():
        import torch

        from depthdecay.model.gguf_cache import converted

        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        return str(converted(path, dtype, lambda message: print(message, flush=True))[0])
    return str(path) if path.is_dir() else model


def model_config(where: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(where)
    except Exception as error:  # not there, not a model, not reachable: the same to the user
        raise DepthDecayError(f"cannot read the model '{where}': {one_line(error)}") from None


def _depth_settings(options: opt.PlanOptions, num_layers: int) -> dict[str, Any]:
    if options.path is not None:
        path = local_plan(options.path)
        # Workers may start in another folder.
        return {"plan": str(path.resolve()) if path.exists() else options.path}
    from depthdecay.integrations.vllm.settings import server_settings

    made = options.settings().by_rule(num_layers)
    return {} if made is None else server_settings(made)


def _serve(words: list[str]) -> None:
    """Like vLLM's own command, which does not start in CPU builds, whose package has another name."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from depthdecay.integrations.vllm.releases import configure_logging

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="depthdecay vllm")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args(words)
    configure_logging(arguments)
    try:
        command.validate(arguments)
        command.cmd(arguments)
    except ValueError as error:
        raise _ours(error) or error from None


def _ours(error: ValueError) -> DepthDecayError | None:
    """Our own error, unwrapped from pydantic's."""
    listed = error.errors() if hasattr(error, "errors") else []
    found = [entry.get("ctx", {}).get("error") for entry in listed]
    return next((inner for inner in found if isinstance(inner, DepthDecayError)), None)
