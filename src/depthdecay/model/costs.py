"""What a plan costs: bytes of weights read per decode step, including repair maps and the LM head."""

from __future__ import annotations

from fractions import Fraction

from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs
from depthdecay.plan.plan import Plan


class Costs:
    """Bytes that one decode step reads at each depth of a plan's ladder. T_0 comes from prefill, so it is no step."""

    def __init__(self, stack: LayerStack, plan: Plan, repairs: Repairs | None = None) -> None:
        self.stack = stack
        self.layers = stack.layer_bytes()
        self.head = stack.head_bytes()
        self.plan = plan
        found = Repairs.of_plan(plan) if repairs is None else repairs
        self.repairs = Repairs() if found is None else found
        self._at: dict[int, int] = {}
        self.item = stack.examples()[0].element_size()

    def at(self, depth: int) -> int:
        """Bytes of one step at this depth; cached, since it is used for every token of many schedules."""
        if depth not in self._at:
            layers = sum(self.layers[layer] for layer in self.plan.layers(depth))
            self._at[depth] = layers + self.repairs.parameters(depth) * self.item + self.head
        return self._at[depth]

    def per_step(self, plan: Plan, tokens: int) -> float:
        """The mean over the steps that produce T_1 to T_(tokens-1)."""
        tokens = max(tokens, 2)
        read = sum(self.at(depth) * count for depth, count in plan.segments(tokens)) - self.at(plan.depth(0))
        return read / (tokens - 1)

    def full(self) -> int:
        return sum(self.layers) + self.head

    def speedup(self, plan: Plan, tokens: int) -> float:
        """Bytes at full depth divided by bytes read: the ideal wall-clock speed-up."""
        return self.full() / self.per_step(plan, tokens)

    def layer_speedup(self, plan: Plan, tokens: int) -> Fraction:
        """The layer speed-up, with repair maps counted as layers of equal size."""
        executed = sum(self.in_layers(depth) * count for depth, count in plan.segments(tokens))
        return Fraction(plan.num_layers * tokens) / executed

    def in_layers(self, depth: int) -> Fraction:
        """A step's layers and repair maps, measured in layers of mean size."""
        return Fraction(self.at(depth) - self.head) * len(self.layers) / sum(self.layers)


def cost_speedup(plan: Plan, stack: LayerStack, tokens: int, repairs: Repairs | None = None) -> float:
    """`Costs.speedup` of one plan on one model."""
    return Costs(stack, plan, repairs).speedup(plan, tokens)
