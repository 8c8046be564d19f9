"""A loaded model, from which an engine is created. Separate from loading, which an engine does not need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from depthdecay.model.weights_origin import WeightsOrigin

Source = Literal["embedded", "gguf", "folder", "hub", "random"]  # random: created for a benchmark


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device; the tokenizer is None if the model ships none."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    source: Source
    origin: WeightsOrigin | None = None

    @property
    def shown_name(self) -> str:
        """The name for published files: an absolute path is shortened, since it means nothing on other machines."""
        return Path(self.name).name if Path(self.name).is_absolute() else self.name

    def quantize_as_filed(self) -> str | None:
        """An engine's default quantization: for the embedded model on a CPU, its file's own int4 blocks.

        Those are the model's original weights, so this is lossless. Any other file keeps the dtype it was loaded in.
        """
        on_cpu = self.source == "embedded" and self.model.device.type == "cpu"
        return "int4" if on_cpu and str(self.model.dtype) == "torch.float32" else None
