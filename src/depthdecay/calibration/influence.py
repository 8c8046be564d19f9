"""Which layers look cheap to drop: two fast heuristics on the full model's hidden states, without running any layer."""

from __future__ import annotations

import torch

from depthdecay.calibration.fit import FitSettings, Moments
from depthdecay.calibration.recording import Recording


@torch.no_grad()
def block_influence(recording: Recording) -> list[float]:
    """ShortGPT's: one minus the mean cosine between each layer's input and output, on decoded positions."""
    layers = recording.stack.num_layers
    sums = [0.0] * layers
    for batch in recording.batches:
        for layer in range(layers):
            before, behind = batch.states[layer][batch.valid].float(), batch.states[layer + 1][batch.valid].float()
            turned = 1 - torch.nn.functional.cosine_similarity(before, behind, dim=-1)
            sums[layer] += float(turned.double().sum())
    return [total / recording.tokens for total in sums]


@torch.no_grad()
def unrepaired_share(recording: Recording, layer: int, settings: FitSettings) -> float:
    """The part of a layer's output, relative to the hidden state, that a repair map would not recover.

    Block influence measures how much a layer does; with repair, what matters is how much of that no map can do.
    """
    example = recording.batches[0].states[layer]
    moments = Moments(example.shape[-1], example.device)
    energy = 0.0
    for batch in recording.batches:
        before, behind = batch.states[layer][batch.valid], batch.states[layer + 1][batch.valid]
        moments.add(before, behind)
        energy += float(behind.float().pow(2).sum())
    repair = moments.solve(layer, layer + 1, settings).to(example.device, torch.float32)
    left = 0.0
    for batch in recording.batches:
        before, behind = batch.states[layer][batch.valid].float(), batch.states[layer + 1][batch.valid].float()
        left += float((repair(before) - behind).pow(2).sum())
    return left / max(energy, 1e-30)
