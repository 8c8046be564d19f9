"""Options that several sub-commands share, and what is made of them: a plan, a loaded model."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthdecay.cli.show import working
from depthdecay.errors import DepthDecayError
from depthdecay.paths import expanded
from depthdecay.plan import Plan
from depthdecay.schedule import exact_alpha, exact_decimal, whole_number

if TYPE_CHECKING:
    from depthdecay.engine import Engine
    from depthdecay.models import LoadedModel
    from depthdecay.stack import Stack

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_OVER = 256
MOST_THREADS = 1024
# Calibrated for the embedded model, and part of the package.
DEFAULT_PLAN = Path(__file__).parents[1] / "data" / "smollm2-135m"

_MODEL, _PLAN, _TEXT, _OUTPUT = "Model", "Depth", "Text", "Output"

Model = Annotated[
    str, typer.Option("--model", "-m", help="A Hugging Face id, a folder or a .gguf file.", rich_help_panel=_MODEL)
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:N or mps; the fastest there is.", rich_help_panel=_MODEL)
]
Dtype = Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or auto.", rich_help_panel=_MODEL)]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the layers: slower to start, faster after.", rich_help_panel=_MODEL)
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="none|int8|int4",
        help="Weights on a CPU; of the embedded model its file's own 4 bits.",
        rich_help_panel=_MODEL,
    ),
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", help="Threads on a CPU; a core each.", rich_help_panel=_MODEL)
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model ships.", rich_help_panel=_MODEL)
]
AllowOtherWeights = Annotated[
    bool,
    typer.Option("--allow-other-weights", help="Use a plan made for other weights.", rich_help_panel=_PLAN),
]

PlanPath = Annotated[
    str | None,
    typer.Option(
        "--plan", help="A plan: a file, a folder, a Hugging Face repository, or default.", rich_help_panel=_PLAN
    ),
]
# Text, not float: alpha means the decimal that was typed.
Alpha = Annotated[
    str | None,
    typer.Option(metavar="NUMBER", help="Token i runs floor(L·α^i) layers; 0 < α ≤ 1.", rich_help_panel=_PLAN),
]
Speedup = Annotated[
    str | None,
    typer.Option(metavar="NUMBER", help="Layers at full depth over layers executed.", rich_help_panel=_PLAN),
]
Over = Annotated[int | None, typer.Option(help="Tokens over which --speedup is the average.", rich_help_panel=_PLAN)]
WarmupTokens = Annotated[int | None, typer.Option(help="Tokens at full depth before decay.", rich_help_panel=_PLAN)]
CoreHead = Annotated[int | None, typer.Option(help="First layers that always run [2].", rich_help_panel=_PLAN)]
CoreTail = Annotated[int | None, typer.Option(help="Last layers that always run [2].", rich_help_panel=_PLAN)]
MinLayers = Annotated[int | None, typer.Option(help="The depth never falls below this.", rich_help_panel=_PLAN)]
Window = Annotated[
    int | None,
    typer.Option(metavar="N", help="In lossless mode: the most drafts before a verification.", rich_help_panel=_PLAN),
]
Lookup = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="In lossless mode: draft what followed the same words before, N of them at most [8]; 0 for none.",
        rich_help_panel=_PLAN,
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="full|decay|lossless",
        help="full ignores the plan; lossless only drafts by it, and says what full depth would.",
        rich_help_panel=_PLAN,
    ),
]

MaxNewTokens = Annotated[int | None, typer.Option("--max-new-tokens", "-n", rich_help_panel=_TEXT)]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=_TEXT)]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=_TEXT)]
TopK = Annotated[int | None, typer.Option(rich_help_panel=_TEXT)]
TopP = Annotated[float | None, typer.Option(rich_help_panel=_TEXT)]
MinP = Annotated[float | None, typer.Option(rich_help_panel=_TEXT)]
RepetitionPenalty = Annotated[float | None, typer.Option(rich_help_panel=_TEXT)]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.", rich_help_panel=_TEXT)]
System = Annotated[str | None, typer.Option(help="A system prompt, for chat models.", rich_help_panel=_TEXT)]

ShowDepth = Annotated[
    bool,
    typer.Option("--show-depth", help="Colour tokens by depth, in a terminal.", rich_help_panel=_OUTPUT),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the text.", rich_help_panel=_OUTPUT)]


@dataclass(frozen=True)
class PlanOptions:
    """The depth options as typed. Checked at once, before a model is loaded; a plan needs its number of layers."""

    path: str | None = None
    alpha: str | None = None
    speedup: str | None = None
    over: int | None = None
    warmup_tokens: int | None = None
    core_head: int | None = None
    core_tail: int | None = None
    min_layers: int | None = None

    def __post_init__(self) -> None:
        sources = {"--plan": self.path, "--alpha": self.alpha, "--speedup": self.speedup}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1 and self.alpha is not None:
            raise DepthDecayError(f"{' and '.join(given)} were given together; each decides the depth, so use one")
        shaping = {
            "--warmup-tokens": (self.warmup_tokens, 0),
            "--core-head": (self.core_head, 0),
            "--core-tail": (self.core_tail, 0),
            "--min-layers": (self.min_layers, 1),
        }
        for name, (value, least) in shaping.items():
            if value is None:
                continue
            if self.path is not None and name != "--warmup-tokens":
                raise DepthDecayError(f"{name} was given with --plan, which says itself which layers are dropped")
            if self.alpha is None and self.speedup is None:
                raise DepthDecayError(f"{name} was given without a decay to shape; add --alpha or --speedup")
            whole_number(name, value, least)
        if self.over is not None:
            if self.speedup is None:
                raise DepthDecayError("--over says what --speedup is averaged over, and was given without it")
            whole_number("--over", self.over, 1)
        if self.alpha is not None:
            exact_alpha(self.alpha)
        if self.speedup is not None and exact_decimal("speed-up", self.speedup) < 1:
            raise DepthDecayError(f"speed-up is {self.speedup}; expected a number of at least 1")

    @property
    def given(self) -> bool:
        return any(value is not None for value in (self.path, self.alpha, self.speedup))

    def load(self) -> Plan | None:
        """The plan file, where one was given; `default` is the embedded model's."""
        if self.path is None:
            return None
        return Plan.load(DEFAULT_PLAN if self.path == "default" else self.path)

    def choose(self, model: Any, name: str, stored: Plan | None, new_tokens: int | None) -> Plan | None:
        """The plan for a loaded model: stored, stored and re-scheduled, calibrated beforehand, or made by rule."""
        from depthdecay.stack import Stack

        over = self.over or new_tokens or DEFAULT_OVER
        stack = Stack.of(model)
        if stored is not None:
            return stored if self.speedup is None else self._rescheduled(stored, stack, over)
        shaped = any(value is not None for value in (self.core_head, self.core_tail, self.min_layers))
        if self.speedup is not None and not shaped and name == DEFAULT_MODEL:
            try:
                return self._rescheduled(Plan.load(DEFAULT_PLAN), stack, over)
            except DepthDecayError:  # faster than it was calibrated for
                warnings.warn(
                    f"the embedded model's calibrated plan does not go as far as {self.speedup}x; layers are dropped "
                    "from the middle outwards instead, by guess: expect much lower quality",
                    stacklevel=2,
                )
        return self.make(stack.num_layers, new_tokens)

    def _rescheduled(self, stored: Plan, stack: Stack, over: int) -> Plan:
        from depthdecay.budget import plan_at_speedup, stored_plan

        assert self.speedup is not None
        base = stored_plan(stored, float(exact_decimal("speed-up", self.speedup)))
        return plan_at_speedup(base, stack, self.speedup, over, warmup_tokens=self.warmup_tokens)

    def make(self, num_layers: int, new_tokens: int | None) -> Plan | None:
        """The plan that --alpha or --speedup describes."""
        shape: dict[str, Any] = {
            "warmup_tokens": self.warmup_tokens,
            "core_head": self.core_head,
            "core_tail": self.core_tail,
            "min_layers": self.min_layers,
        }
        shape = {name: value for name, value in shape.items() if value is not None}
        if self.alpha is not None:
            return Plan.decay(num_layers, self.alpha, **shape)
        if self.speedup is not None:
            over = self.over or new_tokens or DEFAULT_OVER
            return Plan.for_speedup(num_layers, self.speedup, over_tokens=over, **shape)
        return None


@dataclass(frozen=True)
class ModelOptions:
    """Which model, where, and how it may be run."""

    model: str = DEFAULT_MODEL
    device: str | None = None
    dtype: str | None = None
    compile: bool = False
    trust_remote_code: bool = False
    allow_other_weights: bool = False
    quantize: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.quantize not in (None, "none", "int8", "int4"):
            raise DepthDecayError(f"--quantize is {self.quantize!r}; expected none, int8 or int4")
        if self.threads is not None:
            whole_number("--threads", self.threads, 1, MOST_THREADS)

    def load(self, quiet: bool = False) -> LoadedModel:
        # The Hub shows bars of its own while it downloads, which a spinner would tear.
        is_local = self.model == DEFAULT_MODEL or expanded(self.model).exists()
        with working(f"loading {self.model} …", quiet=quiet, spinner=is_local) as say, no_collection():
            from transformers.utils import logging

            from depthdecay.cpu.threads import set_threads
            from depthdecay.models import load

            if self.threads is not None:
                set_threads(self.threads)
            logging.set_verbosity_error()  # advice to programmers, which this program follows or cannot
            return load(
                self.model,
                device=self.device,
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
                progress=say,
            )

    def setting(self, loaded: LoadedModel) -> str | None:
        """What was asked for; else of the embedded model its file's own blocks, which are the model itself."""
        if self.quantize is not None or loaded.source != "embedded" or loaded.model.device.type != "cpu":
            return self.quantize
        return "int4" if str(loaded.model.dtype) == "torch.float32" else None

    def engine(self, loaded: LoadedModel, plan: Plan | None, drafter: Plan | None = None) -> Engine:
        from depthdecay.engine import Engine

        return Engine(
            loaded.model,
            loaded.tokenizer,
            plan,
            compile=self.compile,
            allow_other_weights=self.allow_other_weights,
            drafter=drafter,
            quantize=self.setting(loaded),
            origin=loaded.origin,
        )


@contextmanager
def no_collection() -> Iterator[None]:
    """Libraries make a million objects that stay; looking for garbage among them, now and at each step, finds none."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def open_engine(
    model: ModelOptions, plan: PlanOptions, new_tokens: int | None, mode: str | None = None, quiet: bool = False
) -> tuple[LoadedModel, Engine]:
    """Everything that can be refused without the model is refused first."""
    check_new_tokens(new_tokens)
    if mode not in (None, "full", "decay", "lossless"):
        raise DepthDecayError(f"--mode is {mode!r}; expected full, decay or lossless")
    if mode == "decay" and not plan.given:
        raise DepthDecayError("--mode decay needs to know how deep; add --plan, --alpha or --speedup")
    stored = plan.load()
    loaded = model.load(quiet)
    chosen = plan.choose(loaded.model, loaded.name, stored, new_tokens)
    if mode == "lossless" and chosen is not None and plan.speedup is None:
        from depthdecay.budget import drafter_of

        chosen = drafter_of(chosen)
    # The embedded model's own plan drafts better than a guess.
    drafter = Plan.load(DEFAULT_PLAN) if chosen is None and loaded.name == DEFAULT_MODEL else None
    return loaded, model.engine(loaded, chosen, drafter)


def shallowest_depth(engine: Engine, new_tokens: int | None) -> int:
    """Where the colours end. They are chosen before the text is there, so by the longest that it may become."""
    return (engine.plan or engine.full_plan).depth((new_tokens or DEFAULT_OVER) - 1)


def num_layers(model: Any) -> int:
    from depthdecay.stack import Stack

    return Stack.of(model).num_layers


def check_new_tokens(value: int | None) -> None:
    if value is not None:
        whole_number("--max-new-tokens", value, 1)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """A plan for JSON output; the sample of weights is for machines and thousands of numbers long."""
    values = plan.to_dict()
    if values["model"] is not None:
        values["model"] = {name: value for name, value in values["model"].items() if name != "fingerprint"}
    return values
