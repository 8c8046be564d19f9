"""The depth settings of a server and its requests as plans: `depth_decay` in the configuration and in extra_args."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from depthdecay.errors import DepthDecayError, PlanMismatchError
from depthdecay.model.repairs import reached_depths
from depthdecay.plan.identity import ModelIdentity
from depthdecay.plan.ladder import Ladder
from depthdecay.plan.plan import Plan
from depthdecay.plan.schedule import FullSchedule, PowerSchedule, exact_alpha

KEY = "depth_decay"
_SHAPE = ("alpha", "warmup_tokens", "min_layers", "horizon")
_LADDER = ("core_head", "core_tail", "drop_order")
_SERVER = ("plan", *_SHAPE, *_LADDER, "allow_other_weights", "graph_depths", "group_wait_ms")
# Enough depths that a step runs less than one layer too many, for seconds of start-up.
_GRAPH_DEPTHS = 16
# Batch sizes of graphs by depth. vLLM captures up to 51, but here each is captured for all depths.
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Requests repeat their settings; those that never do must not fill the memory.
_REMEMBERED = 1024


@dataclass
class ServerDepth:
    """The server's plan, which fixes the ladder and the repair maps, and the plans of requests on that ladder."""

    plan: Plan
    allow_other_weights: bool = False
    graph_depths: int = _GRAPH_DEPTHS
    group_wait_ms: float = 0.0
    _asked: dict[str, Plan] = field(default_factory=dict, repr=False)

    @property
    def full_plan(self) -> Plan:
        """All layers, on the server's ladder."""
        return replace(self.plan, schedule=FullSchedule(self.plan.num_layers), rule="full")

    @property
    def least_depth(self) -> int:
        """The shallowest depth that a request can have."""
        known = self._repaired_depths()
        return max(1, self.plan.ladder.min_layers) if known is None else min(known, default=self.plan.num_layers)

    def plan_of(self, extra_args: Mapping[str, Any] | None) -> Plan:
        """The plan of a request: from its extra_args, or else the server's."""
        asked = (extra_args or {}).get(KEY)
        if asked is None:
            return self.plan
        values = _mapping(asked)
        key = json.dumps(values, sort_keys=True, default=str)
        if key not in self._asked:
            if len(self._asked) >= _REMEMBERED:
                self._asked.clear()
            self._asked[key] = self._request_plan(values)
        return self._asked[key]

    def check_shape(self, shape: ModelIdentity) -> None:
        """Refuse a plan for a model of another shape, before any weights are loaded."""
        made_for = self.plan.model
        differences = made_for.shape_differences(shape) if made_for is not None else []
        if differences:
            raise PlanMismatchError(f"the plan was made for {made_for}, but the model is {shape}: {differences[0]}")

    def _request_plan(self, values: dict[str, Any]) -> Plan:
        if any(name in values for name in ("plan", *_LADDER)):
            raise DepthDecayError(
                f"a request takes the ladder of its server, so {KEY} may hold {', '.join(_SHAPE)}, not "
                f"{', '.join(sorted(values.keys() - set(_SHAPE)))}"
            )
        _only(values, _SHAPE)
        if "alpha" not in values:
            raise DepthDecayError(f"a request's {KEY} lacks alpha; 1 is full depth")
        known = self._repaired_depths()
        schedule = PowerSchedule(
            self.plan.num_layers,
            exact_alpha(values["alpha"]),
            values.get("warmup_tokens", 0),
            values.get("min_layers", self.least_depth),
            values.get("horizon"),
        )
        plan = replace(self.plan, schedule=schedule, rule="decay")
        missing = set() if known is None else set(reached_depths(plan)) - known
        if missing:
            raise DepthDecayError(
                f"this request goes to depth {max(missing)}, for which the server's plan has no repairs; it has them "
                f"for depths {', '.join(map(str, sorted(known or ())))}"
            )
        return plan

    def _repaired_depths(self) -> set[int] | None:
        """The depths that have repair maps: those of the server's plan. None if it has no maps at all."""
        return None if self.plan.repairs is None else set(reached_depths(self.plan))


def server_depth(values: Any, num_layers: int) -> ServerDepth:
    """From `depth_decay` in the model's configuration; without it, all layers unless a request says otherwise."""
    given = {} if values is None else _mapping(values)
    _only(given, _SERVER)
    allow = given.pop("allow_other_weights", False)
    if not isinstance(allow, bool):
        raise DepthDecayError(f"{KEY}: allow_other_weights is {allow!r}; expected true or false")
    graph_depths = given.pop("graph_depths", _GRAPH_DEPTHS)
    if not isinstance(graph_depths, int) or isinstance(graph_depths, bool) or graph_depths < 2:
        raise DepthDecayError(f"{KEY}: graph_depths is {graph_depths!r}; expected a whole number, 2 or more")
    group_wait_ms = given.pop("group_wait_ms", 0)
    if not isinstance(group_wait_ms, int | float) or isinstance(group_wait_ms, bool) or not 0 <= group_wait_ms < 1e6:
        raise DepthDecayError(f"{KEY}: group_wait_ms is {group_wait_ms!r}; expected milliseconds, 0 or more")
    if "plan" in given:
        if len(given) > 1:
            others = ", ".join(sorted(given.keys() - {"plan"}))
            raise DepthDecayError(f"{KEY} has a plan, which defines the depths, and also {others}; leave one out")
        if not isinstance(given["plan"], str):
            raise DepthDecayError(f"{KEY}: plan is {reprlib.repr(given['plan'])}; expected a path or a repository")
        plan = Plan.load(given["plan"])
        if plan.num_layers != num_layers:
            raise PlanMismatchError(f"the plan is for {plan.num_layers} layers, but the model has {num_layers}")
    elif "alpha" in given:
        plan = Plan.decay(num_layers, **given)
    else:
        _only(given, _LADDER, because="without alpha ")
        order = given.get("drop_order")
        cores = {name: given.get(name, 2) for name in ("core_head", "core_tail")}
        ladder = Ladder.middle_out(num_layers, **cores) if order is None else Ladder(num_layers, tuple(order))
        plan = Plan(ladder, FullSchedule(num_layers), "full")
    return ServerDepth(plan, allow, graph_depths, group_wait_ms)


def depth_of(config: Any) -> ServerDepth:
    """The depth settings in a model's configuration."""
    return server_depth(getattr(config, KEY, None), config.num_hidden_layers)


def server_settings(plan: Plan) -> dict[str, Any]:
    """A decay by rule in the form of `depth_decay`."""
    if not isinstance(plan.schedule, PowerSchedule):
        raise DepthDecayError(f"only a decay can be given as numbers, not the rule {plan.rule}; save the plan")
    values = {name: getattr(plan.schedule, name) for name in _SHAPE}
    said = {name: value for name, value in values.items() if value is not None}
    # As a string, alpha keeps all its digits.
    return {**said, "alpha": format(plan.schedule.alpha, "f"), "drop_order": list(plan.ladder.drop_order)}


def _mapping(values: Any) -> dict[str, Any]:
    """A mapping, or one as JSON: vLLM's API passes only strings and numbers."""
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except ValueError:
            raise DepthDecayError(f"{KEY} is {reprlib.repr(values)}; expected JSON such as {_EXAMPLE}") from None
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise DepthDecayError(f"{KEY} is {reprlib.repr(values)}; expected an object such as {_EXAMPLE}")
    return dict(values)


_EXAMPLE = '{"alpha": 0.997}'


def _only(values: Mapping[str, Any], known: tuple[str, ...], because: str = "") -> None:
    unknown = values.keys() - set(known)
    if unknown:
        raise DepthDecayError(f"{KEY} has {', '.join(sorted(unknown))}; {because}known are {', '.join(known)}")
