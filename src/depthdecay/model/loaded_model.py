"""A model as it was loaded: what an engine is opened with. Kept apart from loading, which an engine does not need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from depthdecay.model.weights_origin import WeightsOrigin

Source = Literal["embedded", "gguf", "folder", "hub", "random"]  # random: made for a bench


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device; the tokenizer is None where the model ships none."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    source: Source
    origin: WeightsOrigin | None = None

    @property
    def shown_name(self) -> str:
        """For files that others read: a whole path says where a model lies on this machine, which is nobody else's."""
        return Path(self.name).name if Path(self.name).is_absolute() else self.name

    def quantize_as_filed(self) -> str | None:
        """How an engine reads the weights where nobody says: of the embedded model by its file's own blocks.

        Those are the model itself, so nothing is lost; any other file is read in the numbers that it was loaded in.
        """
        on_cpu = self.source == "embedded" and self.model.device.type == "cpu"
        return "int4" if on_cpu and str(self.model.dtype) == "torch.float32" else None
