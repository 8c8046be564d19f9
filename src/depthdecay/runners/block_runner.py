"""Run a pass over a blocked KV cache in the fastest available way, with fallbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from depthdecay.errors import DepthDecayError, NotCapturable, one_line
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
MOST_IN_STEPS = 256  # prompt tokens: in exact mode, a longer chunk gets a pass of its own
INEXACT = "rows of a batch share their matmuls, whose rounding depends on the number of rows"


class BlockRunner:
    """A `Runner`: compiled calls on a CPU, graphs on CUDA, otherwise (and for many tokens) the model's own forward."""

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

    @classmethod
    def with_room(cls, stack: LayerStack, rooms: Sequence[Sequence[int]], repairs: Repairs) -> BlockRunner:
        """For texts whose positions are known, as a list by layer for each."""
        return cls(stack, KVBlocks.of_rows(stack.kept_shapes(), rooms), repairs)

    def use_graphs(self, compiled: CompiledLayers | None, tokens: int) -> None:
        """Run passes over at most `tokens` tokens as CUDA graphs of their layers."""
        from depthdecay.cuda.layer_graphs import LayerGraphs

        self.compiled = None
        self.graphs = LayerGraphs(self.stack, self.blocks, self.repairs, tokens, compiled)

    def use_exact_graphs(self, compiled: CompiledLayers, tokens: int) -> None:
        """The same with batch-invariant results, and without a fallback."""
        from depthdecay.cuda.exact_layer_graphs import ExactLayerGraphs

        self.compiled = None
        self.graphs = ExactLayerGraphs(self.stack, self.blocks, self.repairs, tokens, compiled)

    @property
    def cache_bytes(self) -> int:
        return self.blocks.nbytes

    @property
    def cache_bytes_uniform(self) -> int:
        return self.blocks.nbytes_uniform

    @property
    def inexact(self) -> str | None:
        """Why results may depend on what else is in the pass; None if they are batch-invariant."""
        is_exact = self._exact_graphs is not None if self.compiled is None else self.compiled.is_exact
        return None if is_exact else INEXACT

    @property
    def _exact_graphs(self) -> LayerGraphs | None:
        return self.graphs if self.graphs is not None and self.graphs.exact else None

    def run(self, parts: Sequence[Part], ask: Ask = PLAIN) -> Said:
        tokens = 0
        for part in parts:
            tokens += len(part.tokens)
            self.blocks.make_room(part)
        if self.compiled is not None and self.compiled.takes(tokens):
            return self.compiled.run(parts, ask)
        if self._exact_graphs is not None:
            return self._exactly(self._exact_graphs, parts, tokens, ask)
        if self.graphs is not None and ask.fed is None and self.graphs.takes(tokens):
            said = self._by_graphs(parts, ask)
            if said is not None:
                return said
        return self.forward.run(parts, ask)

    def capture_ahead(self) -> None:
        """Capture the graphs that decode steps will need, if any."""
        if self._exact_graphs is not None:
            _or_refused(self._exact_graphs.capture_layers)
        elif self.graphs is not None:
            self._attempt(self.graphs.capture_layers)

    def _exactly(self, graphs: LayerGraphs, parts: Sequence[Part], tokens: int, ask: Ask) -> Said:
        """Run with graphs or fail. The exception is a long chunk of one prompt: alone in its pass, it has the same
        shapes, and so bitwise identical results, whatever else is in the batch."""
        if len(parts) == 1 and tokens > MOST_IN_STEPS:
            return self.forward.run(parts, ask)
        if not graphs.takes(tokens):
            raise RuntimeError(f"{tokens} tokens of {len(parts)} texts do not fit into a pass of {graphs.rows} rows")
        return _or_refused(lambda: self._compared(graphs, parts, ask))

    def _by_graphs(self, parts: Sequence[Part], ask: Ask) -> Said | None:
        """None if the pass has to run eagerly."""
        graphs = self.graphs
        assert graphs is not None
        return self._attempt(lambda: self._compared(graphs, parts, ask))

    def _compared(self, graphs: LayerGraphs, parts: Sequence[Part], ask: Ask) -> Said:
        """A pass with graphs; the first one is compared with an eager pass."""
        from depthdecay.cuda.capture_or_fallback import require_alike

        said = graphs.run(parts, ask)
        if not graphs.graphs.compared:
            require_alike(said.logits, self.forward.run(parts).logits, "graphs of layers")
            graphs.graphs.compared.add("pass")
        return said

    def _attempt(self, run: Callable[[], Found]) -> Found | None:
        assert self.graphs is not None
        try:
            return self.graphs.graphs.attempt(run)
        except NotCapturable:
            self.graphs = None
            return None


def _or_refused(run: Callable[[], Found]) -> Found:
    """Exact passes have no fallback."""
    try:
        return run()
    except NotCapturable as error:
        raise DepthDecayError(
            f"answers cannot be exact here, since layers cannot be compiled and run as CUDA graphs: {one_line(error)}"
        ) from error
