"""Fitting repair maps in closed form: reduced-rank ridge regression from second moments. No gradient steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from depthdecay.calibration.fidelity import depth_segments
from depthdecay.calibration.recording import Recording
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repair, Repairs, gated, normalised
from depthdecay.plan.ladder import runs_of
from depthdecay.plan.plan import Plan


@dataclass(frozen=True)
class FitSettings:
    """The size of a map, and its regularization."""

    rank: int = 256
    neurons: int = 0  # kept from each dropped layer's MLP, if its kind is supported
    ridge: float = 0.003  # relative to the mean variance


@dataclass(frozen=True)
class Neurons:
    """Some rows of dropped layers' gated MLPs, with the norm's weight folded in."""

    gate: torch.Tensor  # (neurons, hidden)
    lift: torch.Tensor  # (neurons, hidden)

    def __call__(self, normal: torch.Tensor) -> torch.Tensor:
        return gated(normal, self.gate, self.lift)


@torch.no_grad()
def strongest_neurons(stack: LayerStack, start: int, end: int, state: torch.Tensor, count: int) -> Neurons | None:
    """The neurons of each layer in a run that contribute most to its output, given the hidden state before the run."""
    gates, lifts = [], []
    normal = normalised(state)
    for layer in range(start, end):
        mlp = stack.gated_mlp(layer)
        if mlp is None or count == 0:
            return None
        whole = Neurons(mlp.gate * mlp.norm, mlp.up * mlp.norm)
        strength = whole(normal).float().std(0) * mlp.down.float().norm(dim=0)
        chosen = strength.topk(min(count, len(strength))).indices.sort().values
        gates.append(whole.gate[chosen])
        lifts.append(whole.lift[chosen])
    return Neurons(torch.cat(gates), torch.cat(lifts))


class Moments:
    """The sums that a regression is solved from; the data itself need not be kept."""

    def __init__(self, hidden: int, device: torch.device, neurons: Neurons | None = None) -> None:
        self.neurons = neurons
        self.hidden = hidden
        features = hidden + (0 if neurons is None else neurons.gate.shape[0])
        self.count = 0
        self.x = torch.zeros(features, device=device)
        self.y = torch.zeros(hidden, device=device)
        self.xx = torch.zeros((features, features), device=device)
        self.xy = torch.zeros((features, hidden), device=device)

    def add(self, state: torch.Tensor, target: torch.Tensor) -> None:
        """Hidden states before a run, and the full model's after it; one row per token."""
        normal = normalised(state)
        x = normal.float()
        if self.neurons is not None:
            x = torch.cat([x, self.neurons(normal).float()], dim=-1)
        y = target.float() - state.float()
        self.count += x.shape[0]
        self.x += x.sum(0)
        self.y += y.sum(0)
        self.xx += x.T @ x
        self.xy += x.T @ y

    def solve(self, start: int, end: int, settings: FitSettings, prior: Repair | None = None) -> Repair:
        """The map. Its linear part is the best approximation, at its rank, of the full-rank solution's outputs."""
        count = max(self.count, 1)
        mean_x, mean_y = self.x.double() / count, self.y.double() / count
        covariance = self.xx.double() / count - torch.outer(mean_x, mean_x)
        crossing = self.xy.double() / count - torch.outer(mean_x, mean_y)
        variance = covariance.diagonal()
        ridge = torch.empty_like(variance)
        for part in (slice(0, self.hidden), slice(self.hidden, None)):  # neurons and hidden state differ in scale
            ridge[part] = settings.ridge * variance[part].mean().clamp(min=1e-12) if len(ridge[part]) else 0.0
        if prior is not None:
            crossing = crossing + ridge.unsqueeze(1) * _as_matrix(prior)
        whole = torch.linalg.solve(covariance + torch.diag(ridge), crossing)  # x @ whole = y
        linear, others = whole[: self.hidden], whole[self.hidden :]
        spread = linear.T @ covariance[: self.hidden, : self.hidden] @ linear
        directions = _leading_directions(spread, settings.rank)  # (hidden, rank)
        down = linear @ directions
        bias = mean_y - mean_x[: self.hidden] @ down @ directions.T - mean_x[self.hidden :] @ others
        parts = [down.T, directions, bias]
        if self.neurons is not None:
            parts += [self.neurons.gate, self.neurons.lift, others.T]
        return Repair(start, end, *(part.contiguous() for part in parts))


def stored(repair: Repair, example: torch.Tensor) -> Repair:
    """The map as it will be saved and run: in 16 bits, even for a 32-bit model, on the example's device."""
    if example.dtype != torch.float32:
        return repair.to(example.device, example.dtype)
    rounded = repair.to(example.device, torch.float16).to(example.device, torch.float32)
    finite = all(bool(torch.isfinite(part).all()) for part in rounded.parts)
    return rounded if finite else repair.to(example.device, torch.float32)


def _as_matrix(repair: Repair) -> torch.Tensor:
    """The map as one matrix on its features: linear part, then neurons."""
    linear = (repair.up.double() @ repair.down.double()).T
    return linear if repair.out is None else torch.cat([linear, repair.out.double().T])


def _leading_directions(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """Orthonormal columns that span the leading eigenvectors: subspace iteration, far faster than all eigenvectors."""
    size = matrix.shape[0]
    if rank >= size:
        return torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    generator = torch.Generator().manual_seed(0)
    width = min(size, rank + 32)
    columns = torch.randn((size, width), generator=generator, dtype=matrix.dtype).to(matrix.device)
    for _ in range(6):
        columns = torch.linalg.qr(matrix @ columns).Q
    values, vectors = torch.linalg.eigh(columns.T @ matrix @ columns)
    return columns @ vectors[:, values.argsort(descending=True)[:rank]]


class Trace:
    """A shallow model's hidden states before every layer, on a recording, and its maps. Starts as the full model."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.states = [list(batch.states) for batch in recording.batches]
        self.repairs: tuple[Repair, ...] = ()
        self.dropped: frozenset[int] = frozenset()

    def without(self, layers: Iterable[int], settings: FitSettings | None, fitted_on: int | None = None) -> Trace:
        """The same model with these layers dropped too, and maps fitted front to back on the first `fitted_on` batches.

        Everything before the first change is shared with this trace, maps included. Without settings, nothing is fitted
        and dropped layers pass their input on.
        """
        changed = Trace.__new__(Trace)
        changed.recording = self.recording
        changed.states = [list(states) for states in self.states]
        changed.dropped = self.dropped | frozenset(layers)
        runs = runs_of(changed.dropped)
        touched = [run for run in runs if run not in runs_of(self.dropped)]
        start = touched[0][0] if touched else len(self.states[0])
        kept = tuple(repair for repair in self.repairs if repair.end <= start)
        changed.repairs = kept + tuple(changed._walk(start, dict(runs), settings, fitted_on))
        return changed

    @torch.no_grad()
    def _walk(
        self, start: int, runs: dict[int, int], settings: FitSettings | None, fitted_on: int | None
    ) -> list[Repair]:
        """Run from a layer to the end, fitting each run's map on the hidden states that arrive there."""
        repairs: list[Repair] = []
        layer, last = start, self.recording.stack.num_layers
        while layer < last:
            end = runs.get(layer, layer + 1)
            repair = None
            if layer in runs and settings is not None:
                repair = self._fit(layer, end, settings, fitted_on)
                repairs.append(repair)
            for batch, states in zip(self.recording.batches, self.states, strict=True):
                if layer not in runs:
                    states[end] = self.recording.run_layer(batch, layer, states[layer])
                else:
                    states[end] = states[layer] if repair is None else repair(states[layer])
            layer = end
        return repairs

    def _fit(self, layer: int, end: int, settings: FitSettings, fitted_on: int | None) -> Repair:
        batches = self.recording.batches[:fitted_on]
        states = [states[layer][batch.valid] for states, batch in zip(self.states, batches, strict=False)]
        known = strongest_neurons(self.recording.stack, layer, end, _sample(states), settings.neurons)
        moments = Moments(states[0].shape[-1], states[0].device, known)
        for batch, state in zip(batches, states, strict=True):
            moments.add(state, batch.states[end][batch.valid])
        return stored(moments.solve(layer, end, settings), states[0])


_SAMPLE = 4096  # tokens, enough to tell strong neurons from weak ones


def _sample(parts: list[torch.Tensor]) -> torch.Tensor:
    """Some tokens of every batch: batches are sorted by length, and short prompts differ in kind from long ones."""
    each = -(-_SAMPLE // len(parts))
    return torch.cat([part[:: max(1, len(part) // each)][:each] for part in parts])


@torch.no_grad()
def fit_plan(recording: Recording, plan: Plan, settings: FitSettings, prior: Repairs | None = None) -> Repairs:
    """Maps for every depth that the plan visits, fitted on the positions that the plan runs at that depth.

    They see what decoding will see: earlier positions at their own, greater depths. If a prior is given (maps fitted at
    constant depth on all positions), the ridge pulls towards it instead of towards zero.
    """
    segments = depth_segments(plan, recording.columns)
    runs = {depth: dict(runs_of(plan.dropped(depth))) for depth in segments}
    dropped = {depth: frozenset(plan.dropped(depth)) for depth in segments}
    first = min((layer for layers in dropped.values() for layer in layers), default=recording.stack.num_layers)
    states = [batch.states[first] for batch in recording.batches]
    found: dict[int, list[Repair]] = {depth: [] for depth in segments}
    for layer in range(first, recording.stack.num_layers):
        for depth, part in segments.items():
            if layer in runs[depth]:
                before = prior.at(depth).get(layer) if prior is not None else None
                found[depth].append(_fit_part(recording, states, (layer, runs[depth][layer]), part, settings, before))
        kept = any(layer not in layers for layers in dropped.values())
        for number, batch in enumerate(recording.batches):
            state = states[number]
            output = recording.run_layer(batch, layer, state) if kept else state.clone()
            for depth, (start, end) in segments.items():
                if layer in runs[depth]:
                    output[:, start:end] = found[depth][-1](state[:, start:end])
                elif layer in dropped[depth]:
                    output[:, start:end] = state[:, start:end]
            states[number] = output
    return Repairs({depth: tuple(repairs) for depth, repairs in found.items() if depth < plan.num_layers})


def _fit_part(
    recording: Recording,
    states: list[torch.Tensor],
    run: tuple[int, int],
    columns: tuple[int, int],
    settings: FitSettings,
    prior: Repair | None,
) -> Repair:
    """One run's map, fitted on some columns of every text. It uses the prior's neurons, to be comparable with it."""
    layer, behind = run
    part = slice(*columns)
    valid = [batch.valid[:, part] for batch in recording.batches]
    before = [state[:, part][inside] for state, inside in zip(states, valid, strict=True)]
    known = None
    if prior is not None and prior.gate is not None and prior.lift is not None:
        known = Neurons(prior.gate, prior.lift)
    elif prior is None and any(len(state) for state in before):
        known = strongest_neurons(recording.stack, layer, behind, _sample(before), settings.neurons)
    moments = Moments(states[0].shape[-1], states[0].device, known)
    for batch, inside, state in zip(recording.batches, valid, before, strict=True):
        moments.add(state, batch.states[behind][:, part][inside])
    return stored(moments.solve(layer, behind, settings, prior), states[0])
