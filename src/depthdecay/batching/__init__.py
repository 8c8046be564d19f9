"""Many requests in one batch, each at its own position and depth: `Batcher(engine).submit(request)`, then `step()`."""

from ..runners.blocks import Usage
from .batcher import Batcher, BatchSettings, Update

__all__ = ["BatchSettings", "Batcher", "Update", "Usage"]
