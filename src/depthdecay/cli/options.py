"""Options shared by several sub-commands, and what is built from them: a plan, a loaded model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from depthdecay.argument_checks import whole_number
from depthdecay.cli.process import no_collection, settle
from depthdecay.cli.show import working
from depthdecay.engine.plan_choice import DEFAULT_OVER, DepthSettings, require_mode
from depthdecay.errors import DepthDecayError
from depthdecay.files import expanded
from depthdecay.plan.file import EMBEDDED_MODEL
from depthdecay.plan.plan import Plan

if TYPE_CHECKING:
    from depthdecay.engine.engine import Engine
    from depthdecay.model.loaded_model import LoadedModel

DEFAULT_MODEL = EMBEDDED_MODEL
MOST_THREADS = 1024

_model, _plan, _text, _output = (
    functools.partial(typer.Option, rich_help_panel=panel) for panel in ("Model", "Depth", "Text", "Output")
)

Model = Annotated[str, _model("--model", "-m", help="A Hugging Face id, a folder or a .gguf file.")]
Device = Annotated[str | None, _model(help="cpu, cuda, cuda:N or mps (default: the fastest available).")]
Dtype = Annotated[str | None, _model(help="bf16, fp16, fp32 or auto.")]
Compile = Annotated[
    bool | None,
    _model("--compile/--no-compile", help="Compile the layers: starts slower, runs faster (default: on CUDA)."),
]
Quantize = Annotated[
    str | None,
    _model(
        metavar="none|int8|int4",
        help="Quantize the weights on a CPU (default: none; the embedded model runs its file's own 4 bits).",
    ),
]
Threads = Annotated[int | None, _model(metavar="N", help="CPU threads (default: one per core).")]
TrustRemoteCode = Annotated[bool, _model("--trust-remote-code", help="Run code shipped with the model.")]
AllowOtherWeights = Annotated[
    bool, _plan("--allow-other-weights", help="Use a plan that was calibrated for other weights.")
]

PlanPath = Annotated[
    str | None, _plan("--plan", help='A plan: a file, a folder, a Hugging Face repository, or "default".')
]
# Text, not float: alpha means the decimal that was typed.
Alpha = Annotated[str | None, _plan(metavar="NUMBER", help="Token i runs floor(L·α^i) layers; 0 < α ≤ 1.")]
Speedup = Annotated[str | None, _plan(metavar="NUMBER", help="Layer speed-up: run this many times fewer layers.")]
Over = Annotated[
    int | None, _plan(help="Average --speedup over this many tokens (default: as the plan was calibrated).")
]
WarmupTokens = Annotated[int | None, _plan(help="Tokens at full depth before the decay begins.")]
Mode = Annotated[
    str | None,
    _plan(
        metavar="full|decay|lossless",
        help="full: ignore the plan. decay: follow it. lossless: draft with it, verify at full depth.",
    ),
]
MAX_NEW_TOKENS = ("--max-new-tokens", "-n")
MaxNewTokens = Annotated[int | None, _text(*MAX_NEW_TOKENS, help="Longest answer, in tokens.")]
System = Annotated[str | None, _text(help="A system prompt, for chat models.")]

ShowDepth = Annotated[bool, _output("--show-depth", help="Plot each token's depth; in a terminal, also colour it.")]
Json = Annotated[bool, _output("--json", help="Print one JSON object.")]
JSON_FILE = "--json-file"
JsonFile = Annotated[str | None, _output(JSON_FILE, metavar="FILE", help="Write the results to this JSON file.")]
Quiet = Annotated[bool, _output("--quiet", "-q", help="Print only the answer.")]


def grouped(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lets a command take dataclasses of options: typer sees their fields, except those in `left_out`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shown: list[inspect.Parameter] = []
        groups: dict[str, tuple[Any, list[str]]] = {}
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            group = parameter.annotation
            if not is_dataclass(group):
                shown.append(parameter)
                continue
            taken = [option for option in fields(group) if option.name not in left_out]
            groups[parameter.name] = group, [option.name for option in taken]
            types = get_type_hints(group, include_extras=True)
            shown += [
                inspect.Parameter(o.name, parameter.KEYWORD_ONLY, default=o.default, annotation=types[o.name])
                for o in taken
            ]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            made = {
                name: group(**{option: given.pop(option) for option in options})
                for name, (group, options) in groups.items()
            }
            command(**given, **made)

        run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return run

    return decorate


@dataclass(frozen=True)
class PlanOptions:
    """The depth options as typed. Checked at once, before a model is loaded; a plan needs the model's layer count."""

    path: PlanPath = None
    alpha: Alpha = None
    speedup: Speedup = None
    over: Over = None
    warmup_tokens: WarmupTokens = None
    core_head: Annotated[int | None, _plan(help="First layers that always run (default: 2).")] = None
    core_tail: Annotated[int | None, _plan(help="Last layers that always run (default: 2).")] = None
    min_layers: Annotated[int | None, _plan(help="Never run fewer layers than this.")] = None

    def __post_init__(self) -> None:
        self.settings()  # refused here, before anything slow

    def settings(self, new_tokens: int | None = None) -> DepthSettings:
        """The same settings under the library's names."""
        given = {name: value for name, value in vars(self).items() if name not in ("path", "over")}
        return DepthSettings(plan=self.path, over_tokens=self.over, new_tokens=new_tokens, **given)

    @property
    def given(self) -> bool:
        return self.settings().given

    def read(self, new_tokens: int | None = None) -> DepthSettings:
        """The settings under the library's names, with the plan file read."""
        return self.settings(new_tokens).read()

    def load(self) -> Plan | None:
        """The plan file, if one was given."""
        return self.settings().stored()

    def choose(self, model: Any, name: str, stored: Plan | None, new_tokens: int | None) -> Plan | None:
        """The plan for a loaded model; `stored` is the plan file, already read."""
        from depthdecay.model.layers import LayerStack

        return replace(self.settings(new_tokens), plan=stored).choose(LayerStack.of(model), name)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, on which device, and how it runs."""

    model: Model = DEFAULT_MODEL
    device: Device = None
    dtype: Dtype = None
    compile: Compile = None
    quantize: Quantize = None
    threads: Threads = None
    trust_remote_code: TrustRemoteCode = False

    def __post_init__(self) -> None:
        if self.quantize not in (None, "none", "int8", "int4"):
            raise DepthDecayError(f"--quantize is {self.quantize!r}; expected none, int8 or int4")
        if self.threads is not None:
            whole_number("--threads", self.threads, 1, MOST_THREADS)

    def load(self, quiet: bool = False) -> LoadedModel:
        # The Hub shows its own progress bars while downloading; a spinner would garble them.
        is_local = self.model == DEFAULT_MODEL or expanded(self.model).exists()
        with working(f"loading {self.model} …", quiet=quiet, spinner=is_local) as say:
            settle(self.threads)
            with no_collection():
                from depthdecay.model.load import load

                return load(
                    self.model,
                    device=self.device,
                    dtype=self.dtype,
                    trust_remote_code=self.trust_remote_code,
                    progress=say,
                )

    def engine(self, loaded: LoadedModel, plan: Plan | DepthSettings | None, **settings: Any) -> Engine:
        from depthdecay.engine.engine import Engine

        return Engine(loaded, plan=plan, compile=self.compile, quantize=self.quantize, **settings)


@dataclass(frozen=True)
class AnswerOptions:
    """How an answer is drafted, sampled and stopped, under the engine's parameter names."""

    mode: Mode = None
    window: Annotated[
        int | None, _plan(metavar="N", help="Lossless mode: the most tokens drafted per verification.")
    ] = None
    lookup: Annotated[
        int | None,
        _plan(
            metavar="N",
            help="Lossless mode: prompt lookup, matching up to N tokens (default: 8; 0: off).",
        ),
    ] = None
    max_new_tokens: MaxNewTokens = None
    seed: Annotated[int | None, _text(help="Makes sampling repeatable.")] = None
    temperature: Annotated[float | None, _text(help="0 is greedy.")] = None
    top_k: Annotated[int | None, _text(help="Sample from the k likeliest tokens.")] = None
    top_p: Annotated[float | None, _text(help="Sample from the likeliest tokens up to this total probability.")] = None
    min_p: Annotated[float | None, _text(help="Drop tokens below this share of the top probability.")] = None
    repetition_penalty: Annotated[float | None, _text(help="Above 1 makes repeated tokens less likely.")] = None
    stop: Annotated[list[str] | None, _text(help="Stop before this text; repeatable.")] = None


def open_engine(
    model: ModelOptions,
    plan: PlanOptions,
    new_tokens: int | None,
    mode: str | None = None,
    *,
    quiet: bool = False,
    allow_other_weights: bool = False,
) -> tuple[LoadedModel, Engine]:
    """Load the model and open an engine. Whatever can be refused without the model is refused first."""
    at_least(1, max_new_tokens=new_tokens)
    require_mode(mode)
    if mode == "decay" and not plan.given:
        raise DepthDecayError("--mode decay needs a depth setting; add --plan, --alpha or --speedup")
    depth = plan.read(new_tokens)
    loaded = model.load(quiet)
    with working("preparing …", quiet=quiet) as say:
        return loaded, model.engine(loaded, depth, mode=mode, allow_other_weights=allow_other_weights, progress=say)


def shallowest_depth(engine: Engine, new_tokens: int | None) -> int:
    """The depth at the end of the colour scale. Colours are fixed before the text exists, so for its maximum length."""
    return (engine.plan or engine.full_plan).depth((new_tokens or DEFAULT_OVER) - 1)


def at_least(least: int, **options: int | None) -> None:
    """Refuse options whose value is smaller than `least`."""
    for name, value in options.items():
        if value is not None:
            whole_number(f"--{name.replace('_', '-')}", value, least)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """A plan for JSON output, without the sample of weights, which is thousands of values long."""
    values = plan.to_dict()
    if values["model"] is not None:
        values["model"] = {name: value for name, value in values["model"].items() if name != "fingerprint"}
    return values
