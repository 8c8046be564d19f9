"""Many requests in one batch, each at its own position and depth: `Batcher(engine).submit(request)`, then `step()`."""

from .batcher import Batcher, BatchSettings, Update
from .blocks import Usage

__all__ = ["BatchSettings", "Batcher", "Update", "Usage"]
