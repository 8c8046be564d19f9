"""The fastest way there is to run a pass over keys and values in blocks, and what is left where that one fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from depthdecay.errors import NotCapturable
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs
from depthdecay.runners.contract import PLAIN, Ask, Part, Said
from depthdecay.runners.forward import ForwardRunner
from depthdecay.runners.kv_blocks import KVBlocks

if TYPE_CHECKING:
    from depthdecay.cpu.compiled_rows import CompiledRows
    from depthdecay.cuda.compiled_layers import CompiledLayers
    from depthdecay.cuda.layer_graphs import LayerGraphs

Found = TypeVar("Found")


class BlockRunner:
    """A `Runner`: compiled calls on a CPU, graphs on CUDA, else (and for many tokens) the model's own forward."""

    def __init__(self, stack: LayerStack, blocks: KVBlocks, repairs: Repairs) -> None:
        self.stack = stack
        self.blocks = blocks
        self.repairs = repairs
        self.forward = ForwardRunner(stack, blocks, repairs)
        self.compiled: CompiledRows | None = None
        self.graphs: LayerGraphs | None = None  # until something cannot be captured
        if stack.has_compiled_pass:
            from depthdecay.cpu.compiled_rows import CompiledRows

            self.compiled = CompiledRows.of(stack, blocks, repairs)

    def use_graphs(self, compiled: CompiledLayers | None, tokens: int) -> None:
        """Run passes over at most so many tokens as CUDA graphs of their layers."""
        from depthdecay.cuda.layer_graphs import LayerGraphs

        self.compiled = None
        self.graphs = LayerGraphs(self.stack, self.blocks, self.repairs, tokens, compiled)

    @property
    def cache_bytes(self) -> int:
        return self.blocks.nbytes

    @property
    def cache_bytes_uniform(self) -> int:
        return self.blocks.nbytes_uniform

    inexact = "passes over keys and values in blocks may round by how many tokens run together"

    def run(self, parts: Sequence[Part], ask: Ask = PLAIN) -> Said:
        tokens = 0
        for part in parts:
            tokens += len(part.tokens)
            self.blocks.make_room(part)
        if self.compiled is not None and self.compiled.takes(tokens):
            return self.compiled.run(parts, ask)
        if self.graphs is not None and ask.fed is None and self.graphs.takes(tokens):
            said = self._by_graphs(parts, ask)
            if said is not None:
                return said
        return self.forward.run(parts, ask)

    def capture_ahead(self) -> None:
        """Capture what steps will need, where they run as graphs."""
        if self.graphs is not None:
            self._attempt(self.graphs.capture_layers)

    def _by_graphs(self, parts: Sequence[Part], ask: Ask) -> Said | None:
        """None where the pass has to run eagerly. The first one is held against an eager pass."""
        from depthdecay.cuda.capture_or_fallback import require_alike

        graphs = self.graphs
        assert graphs is not None

        def run() -> Said:
            said = graphs.run(parts, ask)
            if not graphs.graphs.compared:
                require_alike(said.logits, self.forward.run(parts).logits, "graphs of layers")
                graphs.graphs.compared.add("pass")
            return said

        return self._attempt(run)

    def _attempt(self, run: Callable[[], Found]) -> Found | None:
        assert self.graphs is not None
        try:
            return self.graphs.graphs.attempt(run)
        except NotCapturable:
            self.graphs = None
            return None
