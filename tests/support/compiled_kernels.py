"""Compiles our Triton kernels for an H200 without one, by Triton's own compiler: `python` this file.

What is launched is compiled instead. It prints, for each binary, the registers of a thread, how many bytes of them
spill into memory, and the shared memory of a program.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from depthdecay.bench.model_shapes import SHAPES
from depthdecay.cuda.decode_attention import spans_of
from depthdecay.cuda.kernels import expert_products, gated_product, gemv, host_copy, keyed_pick
from depthdecay.cuda.kernels import paged_attention as over_blocks
from depthdecay.cuda.kernels import split_attention as attend
from depthdecay.cuda.kernels.keyed_pick import Rules, Seen
from depthdecay.cuda.kernels.paged_attention import Paged

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
MOST_SHARED = 227 * 1024  # bytes that a program can have on sm_90
DTYPES = (torch.bfloat16, torch.float32)


class Nowhere:
    """A driver of a device that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """What has been compiled, in the place of launches."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.about = ""
        driver.set_active(Nowhere())  # type: ignore[arg-type]
        run = JITFunction.run

        def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            made = run(kernel, *args, grid=grid, warmup=True, **options)
            self.note(made)
            return made

        JITFunction.run = compiled

    def note(self, made: Any) -> None:
        if made.hash in self.seen:
            return
        self.seen.add(made.hash)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "kernel.ptx")
            source.write_text(made.asm["ptx"], encoding="utf-8")
            command = [str(PTXAS), "-v", "--gpu-name=sm_90a", str(source), "-o", str(Path(folder, "kernel.cubin"))]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers, spilled = (re.findall(words, said)[0] for words in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
        shared = made.metadata.shared
        assert shared <= MOST_SHARED, f"{made.name} takes {shared} bytes of shared memory"
        print(f"{made.name:22} {self.about:38} {registers:>4} registers {spilled:>5} spilled {shared:>7} shared")


def products(compiled: Compiled, dtype: torch.dtype, heights: list[int], columns: int) -> None:
    weights = [torch.empty(height, columns, dtype=dtype) for height in heights]
    compiled.about = f"{heights[0]} x {columns}, {str(dtype)[6:]}, one row"
    gemv.multiply_one(torch.empty(1, columns, dtype=dtype), weights, True)
    for overlap in (True, False):
        for count in (2, 20, 64):
            compiled.about = f"{heights[0]} x {columns}, {str(dtype)[6:]}, {count} rows"
            gemv.multiply(torch.empty(count, columns, dtype=dtype), weights, overlap)


def gated(compiled: Compiled, dtype: torch.dtype, rows: int, columns: int) -> None:
    gate = torch.empty(rows, columns, dtype=dtype)
    if gated_product.height_for(gate) is not None:
        compiled.about = f"{rows} x {columns}, {str(dtype)[6:]}"
        gated_product.multiply_gated(torch.empty(2, columns, dtype=dtype), gate, gate, True)


def attention(compiled: Compiled, dtype: torch.dtype, heads: int, groups: int, size: int) -> None:
    about = f"{heads} heads of {size}, {str(dtype)[6:]}"
    key = torch.empty(4096, 1, groups, size, dtype=dtype).permute(1, 2, 0, 3)
    query = torch.empty(1, heads, 2, size, dtype=dtype)
    spans = spans_of(torch.zeros(1, dtype=torch.long), torch.arange(2))
    for softcap in (None, 30.0):
        compiled.about = about if softcap is None else f"{about}, capped"
        attend._launched(query, key, key, spans, 0.1, None, softcap, True)
        attend._launched(query, key, key, attend.mask_of(spans, 4096, None), 0.1, None, softcap, True)
        store = torch.empty(64, groups, size, dtype=dtype)
        rows = torch.zeros(8, dtype=torch.long)
        paged = Paged(torch.zeros(8, 4, 64, dtype=torch.int32), rows, rows, rows)
        for exact in (True, False):
            compiled.about = f"{about}, {'exact' if exact else 'plain'}"
            over_blocks._launched(query[:, :, :1], store, store, paged, 2, 0.1, None, softcap, exact)


def experts(compiled: Compiled, dtype: torch.dtype) -> None:
    weights, chosen = torch.empty(8, 1024, 512, dtype=dtype), torch.zeros(4, 2, dtype=torch.long)
    compiled.about = f"8 experts, {str(dtype)[6:]}"
    for each in (True, False):
        x = torch.empty(8 if each else 4, 512, dtype=dtype)
        expert_products.multiply_by_experts(x, chosen, weights, each, True)


def draws(compiled: Compiled) -> None:
    keys, window = torch.zeros(2, dtype=torch.long), torch.zeros(17, dtype=torch.long)
    for count, dtype in ((151_936, torch.bfloat16), (49_152, torch.float32), (16_384, torch.bfloat16)):
        logits, tokens = torch.empty(2, count, dtype=dtype), torch.empty(count, dtype=torch.long)
        seen = Seen(torch.empty(1, count, dtype=torch.bool), window, keys)
        for rules in (Rules(0.7), Rules(0.7, 1.1, 50, 0.9), Rules(0.7, 1.0, 150)):
            compiled.about = f"{count} tokens, {str(dtype)[6:]}, top-k {rules.top_k}"
            for named in (None, tokens):
                for of_text in (None, seen):
                    keyed_pick.launched(logits, keys, named, of_text, rules)


def copies(compiled: Compiled) -> None:
    tokens = torch.empty(16, 3, dtype=torch.long)
    compiled.about = "48 tokens"
    host_copy.launched(tokens, tokens, True)


def main() -> None:
    compiled = Compiled()
    draws(compiled)
    copies(compiled)
    for dtype in DTYPES:
        for shape in ("qwen2.5-1.5b", "llama-2-7b"):
            sizes = SHAPES[shape]
            hidden, size = sizes["hidden_size"], sizes["hidden_size"] // sizes["num_attention_heads"]
            inner, groups = sizes["intermediate_size"], sizes["num_key_value_heads"]
            for heights, columns in (
                ([hidden, groups * size, groups * size], hidden),
                ([hidden], hidden),
                ([inner, inner], hidden),
                ([hidden], inner),
                ([sizes["vocab_size"]], hidden),
            ):
                products(compiled, dtype, heights, columns)
            gated(compiled, dtype, inner, hidden)
            attention(compiled, dtype, sizes["num_attention_heads"], groups, size)
        attention(compiled, dtype, 8, 4, 256)
        experts(compiled, dtype)
    print("compiled")


if __name__ == "__main__":
    main()
