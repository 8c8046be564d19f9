"""`depthdecay serve`: an OpenAI-compatible server with a live page; requests at mixed depths share one batch."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from depthdecay.argument_checks import whole_number
from depthdecay.cli import options as opt
from depthdecay.cli.show import working
from depthdecay.errors import DepthDecayError, install
from depthdecay.files import read_bytes

KEY_VARIABLE = "DEPTHDECAY_API_KEY"
_server, _limit = (partial(typer.Option, rich_help_panel=panel) for panel in ("Server", "Limits"))


@opt.grouped()
def serve(
    *,
    model: opt.ModelOptions,
    plan: opt.PlanOptions,
    allow_other_weights: opt.AllowOtherWeights = False,
    host: Annotated[str, _server(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _server(help="Port to listen on.")] = 8000,
    served_name: Annotated[str | None, _server(help="The model's name in the API (default: as in --model).")] = None,
    api_key: Annotated[str | None, _server(help=f"Key that clients must send; safer in ${KEY_VARIABLE}.")] = None,
    api_key_file: Annotated[str | None, _server(help="Read the API key from a file.")] = None,
    allowed_host: Annotated[
        list[str] | None, _server(help="A host name that clients may use in requests; repeatable. '*': any.")
    ] = None,
    control_tokens_in_content: Annotated[
        bool,
        _server(
            "--control-tokens-in-content",
            help="Read <|im_end|> and the like in a message as control tokens (default: as plain text).",
        ),
    ] = False,
    cors_origin: Annotated[list[str] | None, _server(help="A CORS origin to allow; repeatable.")] = None,
    exact: Annotated[
        bool,
        _server(
            "--exact",
            help="Batch-invariant answers, bitwise the same as alone; refused where our kernels cannot do it.",
        ),
    ] = False,
    max_batch: Annotated[int, _limit(help="Sequences decoded together.")] = 32,
    max_waiting: Annotated[int, _limit(help="Sequences that may queue.")] = 256,
    prefill_tokens: Annotated[
        int | None, _limit(help="Prompt tokens prefilled between two decode steps (default: 64; on CUDA 1024).")
    ] = None,
    cohort_ms: Annotated[
        float, _limit(help="Longest wait for new requests to start together; 0: start at once.")
    ] = 20.0,
    cache_gb: Annotated[
        float | None, _limit(help="KV cache size (default: enough for a full batch, at most half the free memory).")
    ] = None,
    max_positions: Annotated[
        int | None, _limit(help="Longest prompt and answer together (default: the model's context).")
    ] = None,
    draft_rows: Annotated[
        int, _limit(help="Lossless requests draft while a step has at most this many rows, drafts included. 1: never.")
    ] = 64,
    max_body_kb: Annotated[int, _limit(help="Largest request body, in kB.")] = 1024,
    timeout: Annotated[float, _limit(help="Seconds for one request.")] = 600.0,
    client_timeout: Annotated[
        float, _limit(help="Seconds a client may take to send a request or to read, or stay idle between requests.")
    ] = 30.0,
    max_connections: Annotated[int, _limit(help="Most connections; above that, the longest idle is closed.")] = 512,
    grace: Annotated[int, _limit(help="Seconds to finish requests after SIGTERM.")] = 60,
) -> None:
    """Serve a model with the OpenAI API. A page at / shows it at work."""
    key = read_key(api_key, api_key_file)
    whole_number("--port", port, 0, 65535)
    opt.at_least(1, max_body_kb=max_body_kb)
    opt.at_least(0, grace=grace)
    if cache_gb is not None and not cache_gb > 0:
        raise DepthDecayError(f"--cache-gb is {cache_gb}; expected a number above 0")
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise DepthDecayError(f"serving needs {error.name}, which is not installed; {install('serve')}") from None
    from depthdecay.serve.connections import ConnectionLimits
    from depthdecay.serve.hosts import allowed_hosts
    from depthdecay.serve.server import bind, most_connections, run_server

    hosts = allowed_hosts(host, allowed_host or ())
    limits = ConnectionLimits(max_connections, client_timeout, timeout)
    limits = replace(limits, max_connections=most_connections(max_connections))
    sockets = bind(host, port)  # first, so that a port in use is reported before a model is loaded
    loaded, engine = opt.open_engine(model, plan, None, allow_other_weights=allow_other_weights)
    if engine.tokenizer is None:
        raise DepthDecayError("this model has no tokenizer, which serving needs; add its tokenizer files to the model")
    from depthdecay.batching.batcher import Batcher, BatchSettings
    from depthdecay.serve.app import ServeSettings, make_app
    from depthdecay.serve.worker import Worker

    settings = BatchSettings(
        max_batch=max_batch,
        prefill_tokens=prefill_tokens or (1024 if engine.device.type == "cuda" else 64),
        cohort_seconds=cohort_ms / 1000,
        cache_bytes=None if cache_gb is None else int(cache_gb * 1e9),
        max_positions=max_positions,
        draft_rows=draft_rows,
        exact=exact,
    )
    with working("compiling layers and testing exactness …" if exact else "allocating the KV cache …"):
        worker = Worker(Batcher(engine, settings), max_waiting=max_waiting, timeout_seconds=timeout)
    app = make_app(
        worker,
        ServeSettings(
            model_name=served_name or loaded.shown_name,
            api_key=key,
            max_body_bytes=max_body_kb * 1024,
            cors_origins=tuple(cors_origin or ()),
            allowed_hosts=hosts,
            control_tokens_in_content=control_tokens_in_content,
        ),
    )
    run_server(app, worker, sockets, limits, grace)


def read_key(given: str | None, file: str | None) -> str | None:
    """The key from the option, the file or the environment, in this order. An empty key is an error, never "no key"."""
    if given is not None and file is not None:
        raise DepthDecayError("--api-key and --api-key-file were given together; use one")
    if file is not None:
        try:
            key, where = read_bytes(file, f"the key file '{file}'").decode().strip(), f"the file '{file}'"
        except UnicodeDecodeError:
            raise DepthDecayError(f"the key file '{file}' is not UTF-8 text") from None
    elif given is not None:
        key, where = given.strip(), "--api-key"
    elif KEY_VARIABLE in os.environ:
        key, where = os.environ[KEY_VARIABLE].strip(), f"${KEY_VARIABLE}"
    else:
        return None
    if not key:
        raise DepthDecayError(f"the API key in {where} is empty; leave it out to serve without one")
    return key
