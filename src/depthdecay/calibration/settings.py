"""How much a calibration measures."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from depthdecay.calibration.fit import FitSettings


@dataclass(frozen=True)
class CalibrationSettings:
    """How much is measured. `for_device` has defaults for a GPU, and for two cores and a small model."""

    fit_prompts: int = 1024
    select_prompts: int = 128  # for validation: never fitted on, they decide the search and all choices
    held_out_prompts: int = 128  # for the figures that the plan promises; if it exceeds its budget, it is made slower
    new_tokens: int = 200
    again: int = 2  # extra sampled answers to each prompt that is fitted on, if there are fewer prompts than requested
    variety: float = 0.5  # prompts of other kinds, as a share of the user's that are fitted on
    search_prompts: int = 256  # of the fit prompts; the search fits many maps, and fewer texts are enough
    rows: int = 32
    batch: int = 128
    beam: int = 2
    width: int = 4
    first_width: int | None = None  # all layers
    lowest_share: float = 0.5  # the search goes down to this share of the layers
    minutes: float = 8.0  # of search, before it is cut short
    whole_minutes: float | None = None  # for everything, if limited: fewer texts, a shorter search
    learning_minutes: float = 0.0  # the most for training the maps of each plan; 0 for none
    seed: int = 0
    # Map sizes to choose from, by KL at equal cost.
    maps: tuple[FitSettings, ...] = (
        FitSettings(256),
        FitSettings(256, 256),
        FitSettings(512, 1024),
    )
    ridges: tuple[float, ...] = (0.01,)
    warmups: tuple[float, ...] = (0.05, 0.15)  # shares of the horizon, besides none

    def share_for(self, speedup: float) -> float:
        """The lowest share of layers that a ladder needs for a speed-up: somewhat below the mean depth."""
        return min(max(1 / speedup - 0.14, 0.1), 0.9)

    @classmethod
    def for_device(cls, device: torch.device) -> CalibrationSettings:
        if device.type == "cuda":
            return cls()
        return cls(
            fit_prompts=40,
            select_prompts=8,
            held_out_prompts=16,
            new_tokens=96,
            search_prompts=24,
            rows=8,
            batch=16,
            beam=1,
            width=3,
            first_width=8,
            lowest_share=0.7,
            minutes=3.0,
            maps=(FitSettings(64, 64, 0.03),),
            ridges=(),
            warmups=(0.15,),
        )
