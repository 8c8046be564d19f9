"""`depthdecay loadtest`: put load on a running server, measure it, and check that nothing is left behind."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from depthdecay.argument_checks import exact_decimal
from depthdecay.bench.loadtest import Load, LoadReport, run_load
from depthdecay.cli import options as opt
from depthdecay.cli.serve import KEY_VARIABLE
from depthdecay.cli.show import working
from depthdecay.errors import DepthDecayError
from depthdecay.plan.schedule import exact_alpha


def loadtest(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    requests: Annotated[int, typer.Option("--requests", "-r", help="Requests to send.")] = 100,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", help="Most requests in flight.")] = 32,
    arrival: Annotated[
        str, typer.Option(metavar="closed|poisson", help="closed: send one when one ends. poisson: at random times.")
    ] = "closed",
    rate: Annotated[float, typer.Option(help="Requests per second, for poisson.")] = 2.0,
    max_tokens: Annotated[int, typer.Option(*opt.MAX_NEW_TOKENS, help="Longest answer, in tokens.")] = 128,
    mode: Annotated[
        list[str] | None,
        typer.Option(metavar="full|decay|lossless", help="If repeated, chosen at random (default: the server's)."),
    ] = None,
    alpha: Annotated[list[str] | None, typer.Option(metavar="NUMBER", help="Decay with this α; repeatable.")] = None,
    speedup: Annotated[list[str] | None, typer.Option(metavar="NUMBER", help="Layer speed-up; repeatable.")] = None,
    over: Annotated[int | None, typer.Option(help="Average --speedup over this many tokens.")] = None,
    hang_up: Annotated[float, typer.Option(metavar="SHARE", help="Share of clients that disconnect midway.")] = 0.0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For prompts, depths, arrival times and disconnects.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 600.0,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Allow a server on another machine.")] = False,
    json_file: opt.JsonFile = None,
) -> None:
    """Load-test a running server. The API key, if any, is read from $DEPTHDECAY_API_KEY."""
    from depthdecay.result_files import require_writable, write_result

    load = Load(
        url=url.rstrip("/"),
        requests=requests,
        concurrency=concurrency,
        arrival=arrival,
        rate=rate,
        max_tokens=max_tokens,
        depth=depths_of(mode or [], alpha or [], speedup or [], over),
        hang_up=hang_up,
        temperature=temperature,
        seed=seed,
        api_key=os.environ.get(KEY_VARIABLE),
        timeout_seconds=timeout,
        allow_remote=allow_remote,
    )
    require_writable(json_file)
    with working(f"{requests} requests …") as say:
        report = run_load(load, lambda done: say(f"{done} of {requests} requests …"))
    show(report)
    asked = {"requests": requests, "concurrency": concurrency, "arrival": arrival, "max_tokens": max_tokens}
    asked |= {"rate": rate if arrival == "poisson" else None, "depth": list(load.depth), "hang_up": hang_up}
    write_result(json_file, {"kind": "loadtest", "load": asked, **report.figures()})
    if report.errors or any(value > 0 for value in report.left_behind.values()):
        raise typer.Exit(1)


def depths_of(modes: list[str], alphas: list[str], speedups: list[str], over: int | None) -> tuple[dict[str, Any], ...]:
    """The depth settings that requests choose from; an empty one leaves the choice to the server."""
    for mode in modes:
        if mode not in ("full", "decay", "lossless"):
            raise DepthDecayError(f"--mode is {mode!r}; expected full, decay or lossless")
    if over is not None and not speedups:
        raise DepthDecayError("--over was given without --speedup, which it averages; add --speedup")
    average = {} if over is None else {"over_tokens": over}
    chosen: list[dict[str, Any]] = [{"mode": mode} for mode in modes]
    chosen += [{"alpha": float(exact_alpha(alpha))} for alpha in alphas]
    chosen += [{"speedup": float(exact_decimal("speedup", speedup)), **average} for speedup in speedups]
    return tuple(chosen) or ({},)


def show(report: LoadReport) -> None:
    figures = report.figures()
    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "requests": f"{figures['requests']} in {figures['seconds']:.1f} s, {figures['whole']} completed",
        "throughput": f"{figures['tokens_per_second']:.1f} tokens/s, {figures['requests_per_second']:.2f} requests/s",
        "first token": _line(figures["first_token_ms"]),
        "per token": _line(figures["per_token_ms"]),
    }
    if figures["layer_speedup"]:
        rows["layer speed-up"] = f"{figures['layer_speedup']:.3f}"
    if figures["hung_up"]:
        rows["disconnected"] = str(figures["hung_up"])
    held = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in figures["left_behind"].items() if value)
    rows["not released"] = held or "nothing"
    rows["errors"] = ", ".join(f"{kind}: {count}" for kind, count in figures["errors"].items()) or "none"
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _line(values: dict[str, float] | None) -> str:
    return "–" if values is None else " · ".join(f"{name} {value:.0f} ms" for name, value in values.items())
