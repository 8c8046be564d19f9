"""`depthdecay info`: a model's layers and sizes, and what a plan would save on it."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from depthdecay.cli import options as opt
from depthdecay.cli.show import depth_curve, out_console
from depthdecay.errors import DepthDecayError
from depthdecay.plan.ladder import Ladder
from depthdecay.plan.stored_plans import shipped_plan

if TYPE_CHECKING:
    from depthdecay.engine.engine import Engine
    from depthdecay.model.loaded_model import LoadedModel
    from depthdecay.plan.plan import Plan

PROMPT_TOKENS = 32  # for the KV cache figures; the same as in `bench`


@opt.grouped("compile")
def info(
    *,
    model: opt.ModelOptions,
    plan: opt.PlanOptions,
    allow_other_weights: opt.AllowOtherWeights = False,
    tokens: Annotated[int | None, typer.Option(help="Length of the answer that savings are computed for.")] = None,
    fidelity: Annotated[
        int | None,
        typer.Option(metavar="N", help="On a CPU: measure on N prompts the quality loss of --quantize int8 and int4."),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option(opt.JSON_FILE, metavar="FILE", help="With --fidelity: write a result file.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Show a model's layers and sizes, and with --plan, --alpha or --speedup what that saves."""
    opt.at_least(1, tokens=tokens, fidelity=fidelity)
    if fidelity is None and json_file is not None:
        raise DepthDecayError("--json-file was given without --fidelity; it stores the figures of --fidelity only")
    from depthdecay.result_files import require_writable, write_result

    require_writable(json_file)
    length = tokens or plan.over or opt.DEFAULT_OVER
    loaded, engine = opt.open_engine(model, plan, length, quiet=as_json, allow_other_weights=allow_other_weights)
    facts = model_facts(loaded, engine)
    if fidelity is not None:
        facts["fidelity"] = measured_fidelity(loaded, fidelity, quiet=as_json)
    savings = plan_savings(engine, engine.plan, length) if engine.plan is not None else None
    if as_json:
        print(json.dumps({**facts, "savings": savings}, ensure_ascii=False))
    else:
        print_facts(facts, with_ladder=engine.plan is None)
        if engine.plan is not None and savings is not None:
            print_savings(engine.plan, savings)
    write_result(json_file, facts.get("fidelity", {}))


def model_facts(loaded: LoadedModel, engine: Engine) -> dict[str, Any]:
    stack = engine.stack
    config = stack.config
    layer_bytes = stack.layer_bytes()
    return {
        "model": loaded.name,
        "source": loaded.source,
        "architecture": type(stack.model).__name__,
        "num_layers": stack.num_layers,
        "hidden_size": config.hidden_size,
        "parameters": sum(parameter.numel() for parameter in stack.model.parameters()),
        "layer_bytes": list(layer_bytes),
        "head_bytes": stack.head_bytes(),
        "attention": attention_kinds(stack.windows),
        "context_limit": stack.context_limit(),
        "dtype": str(stack.model.dtype).removeprefix("torch."),
        "device": str(engine.device),
        "chat_template": bool(getattr(loaded.tokenizer, "chat_template", None)),
        "default_ladder": default_ladder(loaded.name, stack.num_layers),
        "passes": passes(engine),
    }


def passes(engine: Engine) -> dict[str, Any]:
    """How passes run on a CPU: compiled or by the model's own forward, and which matrices are quantized to what."""
    from depthdecay.cpu.compiled_stack import CompiledLayerStack
    from depthdecay.cpu.supported_models import OtherForm, form_of
    from depthdecay.cpu.threads import threads

    if engine.device.type != "cpu":
        return {"compiled": False, "why": None}
    if isinstance(engine.stack, CompiledLayerStack):
        rounded = engine.stack.rounded
        return {"compiled": True, "threads": threads(), "quantized": None if rounded is None else rounded.describe()}
    try:
        form_of(engine.stack)
    except OtherForm as reason:
        return {"compiled": False, "why": str(reason)}
    return {"compiled": False, "why": "compiled passes cannot be built here, or their results did not match"}


def measured_fidelity(loaded: LoadedModel, prompts: int, quiet: bool) -> dict[str, Any]:
    """KL and agreement of int8 and int4, compared with the model as loaded."""
    from depthdecay.cli.show import working
    from depthdecay.evaluation.quantization_loss import measure_rounding

    with working("measuring …", quiet=quiet) as say:
        return measure_rounding(loaded, ("int8", "int4"), prompts, progress=say)


def attention_kinds(windows: tuple[int | None, ...]) -> list[dict[str, int | None]]:
    """How many layers attend to everything (window null), and how many to a window of each size."""
    return [{"layers": count, "window": window} for window, count in Counter(windows).items()]


def default_ladder(model: str, num_layers: int) -> dict[str, Any] | None:
    """The drop order that --speedup alone uses; null for models too small to have flex layers."""
    shipped = shipped_plan(model)
    if shipped is not None:
        return _ladder_facts("calibrated", shipped.ladder)
    try:
        return _ladder_facts("middle-out", Ladder.middle_out(num_layers))
    except DepthDecayError:
        return None


def _ladder_facts(order: str, ladder: Ladder) -> dict[str, Any]:
    return {"order": order, "core": list(ladder.core), "drop_order": list(ladder.drop_order)}


def plan_savings(engine: Engine, plan: Plan, tokens: int) -> dict[str, Any]:
    """Ideal savings over this many tokens; `bench` measures how much of them is realised."""
    from depthdecay.model.costs import cost_speedup
    from depthdecay.model.kv_cache import rooms
    from depthdecay.runners.kv_blocks import BLOCK, blocks_for

    planned = rooms(plan, PROMPT_TOKENS, tokens, in_buckets=engine.uses_graphs)
    if not engine.uses_graphs:
        planned = [blocks_for(room) * BLOCK for room in planned]
    shapes = engine.stack.kept_shapes()
    full = sum(shape.nbytes * max(planned) for shape in shapes)
    depths = plan.depths(tokens)
    return {
        "plan": opt.plan_dict(plan),
        "tokens": tokens,
        "prompt_tokens": PROMPT_TOKENS,
        "depth_table": [
            {"depth": depth, "first_token": depths.index(depth), "tokens": depths.count(depth)}
            for depth in plan.visited_depths(tokens)
        ],
        "average_depth": plan.layers_executed(tokens) / tokens,
        "layer_speedup": plan.layer_speedup(tokens),
        "cost_speedup": cost_speedup(plan, engine.stack, tokens),
        "cache_bytes_full": full,
        "cache_bytes_saved": full - sum(shape.nbytes * room for shape, room in zip(shapes, planned, strict=True)),
    }


def print_facts(facts: dict[str, Any], with_ladder: bool) -> None:
    """Prints the model's facts, without the default ladder if a plan follows, which has its own."""
    sizes = sorted(set(facts["layer_bytes"]))
    layer = size_words(sizes[0]) if len(sizes) == 1 else f"{size_words(sizes[0])} to {size_words(sizes[-1])}"
    kinds = (
        f"{kind['layers']} layers attend to "
        + ("everything" if kind["window"] is None else f"a window of {kind['window']}")
        for kind in facts["attention"]
    )
    rows = {
        "model": f"{facts['model']} ({facts['source']})",
        "architecture": facts["architecture"],
        "layers": f"{facts['num_layers']}, {layer} each",
        "hidden size": str(facts["hidden_size"]),
        "parameters": f"{facts['parameters'] / 1e6:,.1f} million",
        "LM head": size_words(facts["head_bytes"]),
        "attention": ", ".join(kinds),
        "context": f"{facts['context_limit']} tokens" if facts["context_limit"] else "no limit set",
        "dtype": facts["dtype"],
        "device": facts["device"],
        "passes": passes_words(facts["passes"]),
        "chat template": "yes" if facts["chat_template"] else "no",
        "default mode": "lossless: the full model's answer, with speculative decoding where it pays off",
    }
    if with_ladder:
        ladder = facts["default_ladder"]
        rows["default ladder"] = ladder_words(ladder) if ladder else "none: too few layers to drop any"
    if facts["passes"].get("quantized") and facts["passes"]["quantized"]["own_precision"]:
        rows["not quantized"] = ", ".join(facts["passes"]["quantized"]["own_precision"])
    for setting, figures in facts.get("fidelity", {}).get("settings", {}).items():
        words = f"KL {figures['kl']:.2g}, agreement {figures['agreement']:.4f} with {facts['fidelity']['against']}"
        rows[f"fidelity of {setting}"] = f"{words} ({facts['fidelity']['prompts']} prompts)"
    _print_rows(rows)


def passes_words(passes: dict[str, Any]) -> str:
    if not passes["compiled"]:
        return "the model's own forward" + (f": {passes['why']}" if passes["why"] else "")
    words = f"compiled, {passes['threads']} threads"
    quantized = passes["quantized"]
    if quantized is None:
        return f"{words}, weights not quantized"
    kinds = ", ".join(
        f"{count} {'matrix' if count == 1 else 'matrices'} in {kind}" for kind, count in quantized["matrices"].items()
    )
    kept = quantized["blocks_of_the_file"]
    share = "all" if kept == sum(quantized["matrices"].values()) else f"{kept} of them"
    return f"{words}, {kinds}" + (f" ({share} as quantized in the file)" if kept else "")


def ladder_words(ladder: dict[str, Any]) -> str:
    guess = ", a guess" if ladder["order"] == "middle-out" else ""
    first = layer_words(ladder["drop_order"][:4])
    return f"{ladder['order']}{guess}: core {layer_words(ladder['core'])}, first dropped {first} …"


def print_savings(plan: Plan, savings: dict[str, Any]) -> None:
    tokens = savings["tokens"]
    console = out_console()
    console.print()
    full, saved = savings["cache_bytes_full"], savings["cache_bytes_saved"]
    table = savings["depth_table"]
    _print_rows(
        {
            "plan": plan.describe(),
            "ladder": ladder_words(_ladder_facts(ladder_order(plan), plan.ladder)),
            f"depth over {tokens} tokens": f"{table[0]['depth']} to {table[-1]['depth']}, "
            f"average {savings['average_depth']:.2f} of {plan.num_layers}",
            "layer speed-up": f"{savings['layer_speedup']:.3f}x",
            "cost speed-up": f"{savings['cost_speedup']:.3f}x (bytes of weights read, LM head included)",
            "KV cache": f"{size_words(saved)} of {size_words(full)} saved (with a prompt of {PROMPT_TOKENS} tokens)",
        }
    )
    if console.is_terminal:
        console.print()
        console.print(depth_curve(plan.depths(tokens), plan.num_layers, table[-1]["depth"], min(console.width, 80)))


def ladder_order(plan: Plan) -> str:
    """Where a plan's drop order comes from."""
    if "calibration" in plan.notes:
        return "calibrated"
    return "middle-out" if plan.ladder.is_guess else "given by the plan"


def _print_rows(rows: dict[str, str]) -> None:
    console = out_console()
    if not console.is_terminal:
        width = max(map(len, rows))
        for name, value in rows.items():
            print(f"{name:<{width}}  {value}")
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table, soft_wrap=False, markup=False)


def size_words(size: int) -> str:
    """Bytes in readable form, in the decimal units used for bandwidths."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def layer_words(layers: list[int]) -> str:
    return ", ".join(map(str, layers))
