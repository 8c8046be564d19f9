"""From a request's depth settings to a mode and a plan on the served ladder."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import DEFAULT_OVER
from depthdecay.errors import DepthDecayError
from depthdecay.model.speedup import plan_at_speedup
from depthdecay.plan.plan import Plan
from depthdecay.plan.schedule import PowerSchedule, exact_alpha
from depthdecay.serve.schema import DepthRequest


class Depths:
    """The served ladder with any schedule. Requests cannot choose another ladder, since a batch has one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.base = engine.drafting_plan
        # Where layers have repair maps, depths without maps would be far less accurate.
        mapped = engine.repairs.at_depth
        self.least = max(1, self.base.ladder.min_layers, min(mapped, default=0))
        self.at_speedup = lru_cache(maxsize=256)(self._at_speedup)
        self.at_alpha = lru_cache(maxsize=256)(self._at_alpha)

    def resolve(self, asked: DepthRequest, max_tokens: int | None) -> tuple[str, Plan | None]:
        if asked.alpha is not None:
            return "decay", self.at_alpha(asked.alpha)
        if asked.speedup is not None:
            # A calibrated plan's speed-ups refer to the length that it was calibrated for, as in the library.
            calibrated_for = self.base.notes.get("over_tokens")
            over = asked.over_tokens or calibrated_for or max_tokens or DEFAULT_OVER
            return "decay", self.at_speedup(asked.speedup, over)
        mode = asked.mode or self.engine.row_mode
        if mode == "decay" and self.engine.plan is None:
            raise DepthDecayError("mode decay needs alpha or speedup, since the server was started without a plan")
        return mode, self.engine.plan if mode == "decay" else None

    def _at_alpha(self, alpha: float) -> Plan:
        layers = self.base.num_layers
        own = self.base.schedule
        warmup = own.warmup_tokens if isinstance(own, PowerSchedule) else 0
        schedule = PowerSchedule(layers, exact_alpha(alpha), warmup, self.least)
        return replace(self.base, schedule=schedule, rule="decay")

    def _at_speedup(self, speedup: float, over_tokens: int) -> Plan:
        least = {"min_layers": self.least}
        return plan_at_speedup(self.base, self.engine.stack, speedup, over_tokens, self.engine.repairs, **least)

    def most_speedup(self, over_tokens: int = DEFAULT_OVER) -> float:
        """The highest speed-up that a request may choose over so many tokens, in tenths; for the page's slider."""
        most = 1.0
        for tenths in range(11, 31):
            try:
                self.at_speedup(tenths / 10, over_tokens)
            except DepthDecayError:
                break
            most = tenths / 10
        return most
