"""`depthdecay check`: is decoding correct on the user's model? One row per check; the exit code is 0 if all pass."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from depthdecay.cli import options as opt
from depthdecay.cli.show import out_console, working

if TYPE_CHECKING:
    from depthdecay.self_check import CheckRow


@opt.grouped()
def check(
    model: opt.Model = opt.DEFAULT_MODEL,
    device: opt.Device = None,
    dtype: Annotated[
        str, typer.Option(help="In 16 bits, near-ties may flip by rounding alone.", rich_help_panel="Model")
    ] = "fp32",
    trust_remote_code: opt.TrustRemoteCode = False,
    *,
    plan: opt.PlanOptions,
    allow_other_weights: opt.AllowOtherWeights = False,
    new_tokens: Annotated[int, typer.Option(*opt.MAX_NEW_TOKENS, help="Tokens per answer.")] = 24,
    as_json: opt.Json = False,
) -> None:
    """Check that decoding matches transformers' generate on a model, and leaves the model unchanged."""
    opt.at_least(1, max_new_tokens=new_tokens)
    stored = plan.load()
    options = opt.ModelOptions(model, device, dtype, trust_remote_code=trust_remote_code)
    loaded = options.load(quiet=as_json)
    chosen = plan.choose(loaded.model, loaded.name, stored, new_tokens)

    from depthdecay import self_check
    from depthdecay.model.layers import LayerStack

    chosen = chosen or self_check.default_plan(LayerStack.of(loaded.model).num_layers, new_tokens)
    number_type = str(loaded.model.dtype).removeprefix("torch.")
    console = out_console()
    if not as_json:
        console.print(
            Text(f"{loaded.name} in {number_type} on {loaded.model.device}, greedy, {new_tokens} tokens", style="bold")
        )
        if chosen is not None:
            console.print(Text(chosen.describe(), style="dim"))
    with ExitStack() as spinner:

        def show(row: CheckRow) -> None:
            spinner.close()  # it would garble the line
            if not as_json:
                mark = ("✓", "green") if row.passed else ("✗", "red")
                console.print(Text.assemble(mark, f" {row.name}", (f"  {row.detail}", "dim")))
            spinner.enter_context(working("checking …", quiet=as_json))

        spinner.enter_context(working("checking …", quiet=as_json))
        rows = self_check.check(
            loaded, chosen, new_tokens=new_tokens, allow_other_weights=allow_other_weights, progress=show
        )
    passed = all(row.passed for row in rows)
    if not as_json:
        failed = sum(not row.passed for row in rows)
        console.print(f"{failed} of {len(rows)} checks failed" if failed else f"all {len(rows)} checks passed")
    if as_json:
        report = {
            "model": loaded.name,
            "dtype": number_type,
            "device": str(loaded.model.device),
            "new_tokens": new_tokens,
            "plan": None if chosen is None else opt.plan_dict(chosen),
            "passed": passed,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(report, ensure_ascii=False))
    raise typer.Exit(0 if passed else 1)
