"""Run each layer of a vLLM model on the rows that need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.sequence import IntermediateTensors

from depthdecay.integrations.vllm.layer_rows import Rows, Step
from depthdecay.model.repairs import Repairs

# Attention metadata and cache slots for some rows, by the name of the attention layer.
Attention = tuple[dict[str, Any], dict[str, torch.Tensor]]
Attend = Callable[[Rows], Attention]


class DepthStep:
    """What the model runner passes to the model: the step, and how to build attention metadata for some of its rows."""

    def __init__(
        self,
        step: Step,
        attend: Attend,
        run_instead: Callable[..., Any] | None = None,
        on_run: Callable[[Step], None] | None = None,
    ) -> None:
        self.step = step
        self._attend = attend
        # With graphs by depth: the pass that runs all rows to one depth, and who counts steps without a graph.
        self.run_instead = run_instead
        self.on_run = on_run
        self._told: dict[int, Attention] = {}

    def tell_attention(self, rows: Rows, layer_name: str) -> None:
        """Set the entry of the layer that runs next: each reads its own in the forward context."""
        if id(rows) not in self._told:
            self._told[id(rows)] = self._attend(rows)
        metadata, slots = self._told[id(rows)]
        context = get_forward_context()
        context.attn_metadata[layer_name] = metadata[layer_name]
        context.slot_mapping[layer_name] = slots[layer_name]


class State:
    """The state of all rows, and of those that the current layers run on.

    vLLM keeps it in two parts: what the last layer added, and the residual before it. Rows are gathered and scattered
    only where the set changes.
    """

    def __init__(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        self.all_positions = positions
        self.all_hidden, self.all_residual = hidden, residual
        self.rows: Rows | None = None
        self.positions, self.hidden, self.residual = positions, hidden, residual

    def take(self, rows: Rows | None) -> None:
        """Continue with these rows; None means all."""
        self.rows = rows
        if rows is None:
            self.positions, self.hidden, self.residual = self.all_positions, self.all_hidden, self.all_residual
            return
        self.positions = self.all_positions[rows.index]
        self.hidden = self.all_hidden[rows.index]
        self.residual = self.whole_residual()[rows.index]

    def put_back(self) -> None:
        if self.rows is None:
            self.all_hidden, self.all_residual = self.hidden, self.residual
            return
        assert self.residual is not None
        self.all_hidden.index_copy_(0, self.rows.index, self.hidden)
        self.whole_residual().index_copy_(0, self.rows.index, self.residual)
        self.take(None)

    def whole_residual(self) -> torch.Tensor:
        """There is none before the first layer; zeros are equivalent."""
        if self.all_residual is None:
            self.all_residual = torch.zeros_like(self.all_hidden)
        return self.all_residual

    def repair(self, rows: torch.Tensor, repaired: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the state of these rows by what a map computes; `put_back` has been called."""
        residual = self.whole_residual()
        guess = repaired(self.all_hidden[rows] + residual[rows])
        self.all_hidden.index_fill_(0, rows, 0)
        residual.index_copy_(0, rows, guess)
        self.take(None)


def run_layers(
    model: Any,
    depth: DepthStep,
    repairs: Repairs,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    intermediate_tensors: IntermediateTensors | None,
    inputs_embeds: torch.Tensor | None,
) -> torch.Tensor | IntermediateTensors:
    """The model's forward pass with each layer on its rows. `model` is the decoder below the LM head."""
    state = State(positions, *first_state(model, input_ids, intermediate_tensors, inputs_embeds))
    step = depth.step
    maps = [(at, repairs.at(at)) for at in step.reached if at in repairs.at_depth]
    here: Rows | bool = True
    for index in range(model.start_layer, model.end_layer):
        runs = step.runs(index)
        if runs is not here:
            here = runs
            state.put_back()
            # A map is applied where its rows stop running, so the set of rows changes there too.
            for at, of_layer in maps:
                if index in of_layer:
                    state.repair(step.rows_at(at), of_layer[index])
            state.take(None if isinstance(runs, bool) else runs)
        if here is False:
            continue
        layer = model.layers[index]
        if isinstance(here, Rows):
            depth.tell_attention(here, layer.self_attn.attn.layer_name)
        state.hidden, state.residual = layer(state.positions, state.hidden, state.residual)
    state.put_back()
    return last_state(model, state.all_hidden, state.whole_residual())


def first_state(
    model: Any,
    input_ids: torch.Tensor | None,
    intermediate_tensors: IntermediateTensors | None,
    inputs_embeds: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The input of this pipeline stage's first layer."""
    if get_pp_group().is_first_rank:
        return (model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds), None
    assert intermediate_tensors is not None
    return intermediate_tensors["hidden_states"], intermediate_tensors["residual"]


def last_state(model: Any, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | IntermediateTensors:
    """The output of this pipeline stage."""
    if not get_pp_group().is_last_rank:
        return IntermediateTensors({"hidden_states": hidden, "residual": residual})
    normed, _ = model.norm(hidden, residual)
    return normed
