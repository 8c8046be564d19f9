"""`depthdecay export`: a plan's learned drafter in a format that other engines load."""

from __future__ import annotations

from typing import Annotated

import typer

from depthdecay.cli import options as opt
from depthdecay.cli.process import settle
from depthdecay.cli.show import out_console, working
from depthdecay.files import expanded


def export(
    plan: Annotated[str, typer.Argument(help="A plan with a learned drafter: a folder or a file.")],
    out: Annotated[str, typer.Argument(help="Folder for the drafter: new, empty, or holding an earlier export.")],
    as_format: Annotated[str, typer.Option("--format", metavar="eagle3", help="For vLLM and SGLang.")] = "eagle3",
    model: opt.Model = opt.DEFAULT_MODEL,
    dtype: opt.Dtype = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_other_weights: opt.AllowOtherWeights = False,
) -> None:
    """Export a plan's learned drafter for speculative decoding in vLLM or SGLang."""
    # The Hub shows its own progress bars while downloading; a spinner would garble them.
    with working("exporting …", spinner=model == opt.DEFAULT_MODEL or expanded(model).exists()) as say:
        settle(None)
        from depthdecay.integrations.eagle3.export import export as save_for_engines

        folder = save_for_engines(
            plan,
            out,
            model=model,
            format=as_format,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            allow_other_weights=allow_other_weights,
            progress=say,
        )
    told = f"drafter in EAGLE-3 format: {folder}; its README.md shows how to start vLLM and SGLang with it"
    out_console().print(told, markup=False)
