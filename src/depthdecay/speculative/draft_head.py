"""A learned drafter: one decoder layer that is fed with states of the full model, in the form of EAGLE-3.

To predict what follows token x_j, it gets two inputs: the output of the model's first layers for x_j (with none, the
token's embedding), and the full model's states at the preceding position, projected to one by `fc`. After the last
verified position there are no such states, and the head's own output is used instead. A head with no first layers has
the form that other engines load (`depthdecay export`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from depthdecay.cpu.quantized_blocks import INT4, QuantizedBlocks, can_hold, rounded_to_4
from depthdecay.errors import DepthDecayError, PlanMismatchError
from depthdecay.model.layers import LayerStack
from depthdecay.model.tensor_files import read_tensors, write_tensors
from depthdecay.plan.plan import Plan

HEAD_FILE = "draft_head.safetensors"
PORTABLE_HEAD_FILE = "portable_head.safetensors"  # in the format that other engines load
_KIND = ("depthdecay-draft-head", "1")

KeysAndValues = tuple[torch.Tensor, torch.Tensor]  # each (rows, heads, positions, size)


@dataclass(frozen=True)
class HeadShape:
    """The shapes of a head's tensors, and which inputs it takes from the model."""

    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    neurons: int
    first_layers: int  # of the model, that a token runs through before the head
    states: tuple[int, ...]  # layers after which the full model's states are taken
    epsilon: float = 1e-6
    rotary_scale: float = 1.0

    @classmethod
    def of(
        cls, stack: LayerStack, *, first_layers: int = 0, states: tuple[int, ...] = (), width: float = 1.0
    ) -> HeadShape:
        """As wide as one of the model's own layers, or a fraction of that."""
        config = stack.config
        heads = int(config.num_attention_heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        groups = int(getattr(config, "num_key_value_heads", None) or heads)
        neurons = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
        return cls(
            hidden=stack.hidden_size,
            heads=heads,
            key_value_heads=groups,
            head_size=size,
            neurons=max(1, int(width * neurons)),
            first_layers=first_layers,
            states=states or outer_states(stack.num_layers),
            epsilon=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        )

    def is_portable(self, num_layers: int) -> bool:
        """Whether its inputs are those that other engines provide: a token's embedding, and EAGLE-3's states."""
        return self.first_layers == 0 and self.states == portable_states(num_layers)

    def check(self, stack: LayerStack) -> None:
        if self.hidden != stack.hidden_size or max(self.states) >= stack.num_layers:
            raise PlanMismatchError(
                f"the plan's draft head is for a model of hidden size {self.hidden} and more than {max(self.states)} "
                f"layers, but this one has {stack.hidden_size} and {stack.num_layers}"
            )


def outer_states(num_layers: int) -> tuple[int, ...]:
    """A low layer, a middle one and the last: the most informative for a head."""
    return tuple(sorted({min(1, num_layers - 1), max(0, num_layers // 2 - 1), num_layers - 1}))


def portable_states(num_layers: int) -> tuple[int, ...]:
    """Those that engines use for EAGLE-3 by default: the inputs of layers 2, n // 2 and n - 3."""
    return 1, num_layers // 2 - 1, num_layers - 4


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(state, (state.shape[-1],), self.weight.to(state.dtype), self.epsilon)


class DraftHead(nn.Module):
    """The layer. `frequencies`: of the rotary embedding. `vocabulary`: the tokens that it can draft, ascending."""

    frequencies: torch.Tensor
    vocabulary: torch.Tensor

    def __init__(self, shape: HeadShape, frequencies: torch.Tensor, vocabulary: torch.Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.right = 0.6  # draft accuracy, as far as is known
        hidden, size = shape.hidden, shape.head_size
        self.fc = nn.Linear(len(shape.states) * hidden, hidden, bias=False)
        self.join = nn.Linear(hidden, hidden, bias=False) if shape.first_layers else None
        self.token_norm = RMSNorm(hidden, shape.epsilon)
        self.state_norm = RMSNorm(hidden, shape.epsilon)
        self.query = nn.Linear(2 * hidden, shape.heads * size, bias=False)
        self.key = nn.Linear(2 * hidden, shape.key_value_heads * size, bias=False)
        self.value = nn.Linear(2 * hidden, shape.key_value_heads * size, bias=False)
        self.output = nn.Linear(shape.heads * size, hidden, bias=False)
        self.mlp_norm = RMSNorm(hidden, shape.epsilon)
        self.gate = nn.Linear(hidden, shape.neurons, bias=False)
        self.up = nn.Linear(hidden, shape.neurons, bias=False)
        self.down = nn.Linear(shape.neurons, hidden, bias=False)
        self.norm = RMSNorm(hidden, shape.epsilon)
        self.register_buffer("frequencies", frequencies.float())
        self.register_buffer("vocabulary", vocabulary.long())

    @classmethod
    def new(cls, stack: LayerStack, shape: HeadShape, vocabulary: torch.Tensor) -> DraftHead:
        """Untrained: the layer adds almost nothing yet, and the final norm is the model's."""
        size, device = shape.head_size, stack.model.device
        found = _rotary(stack)
        plain = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        usable = found is not None and 2 * len(found[0]) == size
        frequencies, scale = found if found is not None and usable else (plain, 1.0)
        head = cls(replace(shape, rotary_scale=scale), frequencies.cpu(), vocabulary.cpu())
        for matrix in (head.output, head.down):
            nn.init.normal_(matrix.weight, std=1e-3)
        last = final_norm(stack)
        if last is not None:
            head.norm.weight.data.copy_(last)
        return head.to(device)

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        """Project the full model's states at a position, (…, states · hidden), to one."""
        joined: torch.Tensor = self.fc(states)
        return joined

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> KeysAndValues:
        """Cosine and sine for positions (rows, tokens): (rows, 1, tokens, size)."""
        angles = positions[:, None, :, None].float() * self.frequencies
        both = torch.cat([angles, angles], dim=-1)
        scale = self.shape.rotary_scale
        return (both.cos() * scale).to(dtype), (both.sin() * scale).to(dtype)

    def project(
        self, tokens: torch.Tensor, before: torch.Tensor, angles: KeysAndValues
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values (rows, heads, tokens, size) for tokens and the states at the preceding positions."""
        both = torch.cat([self.token_norm(tokens), self.state_norm(before)], dim=-1)
        query, key, value = (self._split(part(both)) for part in (self.query, self.key, self.value))
        return _turned(query, angles), _turned(key, angles), value

    def finish(self, tokens: torch.Tensor, before: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The head's state of each token, from the attention output (rows, heads, tokens, size)."""
        state = before if self.join is None else before + self.join(tokens)
        state = state + self.output(mixed.transpose(1, 2).flatten(2))
        normal = self.mlp_norm(state)
        said: torch.Tensor = state + self.down(functional.silu(self.gate(normal)) * self.up(normal))
        return said

    def _split(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(*flat.shape[:2], -1, self.shape.head_size).transpose(1, 2)

    @property
    def nbytes(self) -> int:
        """Bytes that one draft reads, besides its rows of the LM head."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())

    @torch.no_grad()
    def round_to_4_bits(self) -> None:
        """Give all matrices values that int4 holds exactly, as they have when saved that way."""
        for parameter in self.parameters():
            if can_hold(parameter):
                parameter.copy_(rounded_to_4(parameter).widened())

    def save(self, file: Path, *, in_4_bits: bool = False) -> Path:
        """`in_4_bits`: int4 matrices, a third of the size, as used for drafting with an int4 model on a CPU."""
        tensors = {name: _packed(tensor.detach().cpu().contiguous()) for name, tensor in self.state_dict().items()}
        tensors["vocabulary"] = tensors["vocabulary"].to(torch.int32)
        if in_4_bits:
            tensors = {
                part: kept for name, tensor in tensors.items() for part, kept in _in_4_bits(name, tensor).items()
            }
        kind = dict(zip(("format", "version"), _KIND, strict=True))
        about = {**kind, "shape": json.dumps(asdict(self.shape)), "right": str(self.right)}
        return write_tensors(file, tensors, about, "draft head")

    @classmethod
    def load(cls, file: Path) -> DraftHead:
        return read_tensors(file, _KIND, "draft head", cls._of)

    @classmethod
    def _of(cls, tensors: dict[str, torch.Tensor], about: Mapping[str, Any]) -> DraftHead:
        shape = json.loads(about["shape"])
        tensors = _widened(tensors)
        with torch.device("meta"):
            head = cls(
                HeadShape(**{**shape, "states": tuple(shape["states"])}),
                torch.empty(tensors["frequencies"].shape),
                torch.empty(tensors["vocabulary"].shape),
            )
        tensors["vocabulary"] = tensors["vocabulary"].long()
        head.load_state_dict(tensors, assign=True)
        head.right = min(max(float(about["right"]), 0.0), 1.0)
        return head.requires_grad_(False)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """In half the bytes if that is lossless, as it is for fitted heads, which are rounded to bfloat16."""
    half = tensor.bfloat16() if tensor.dtype == torch.float32 else tensor
    return half if torch.equal(half.to(tensor.dtype), tensor) else tensor


_NUMBERS, _SCALE, _OFFSET = ".numbers", ".scale", ".offset"  # the tensors of an int4 matrix


def _in_4_bits(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix as its int4 tensors; anything else unchanged."""
    if not (tensor.is_floating_point() and can_hold(tensor)):
        return {name: tensor}
    blocks = rounded_to_4(tensor)
    assert blocks.offset is not None
    pairs = blocks.numbers.reshape(blocks.rows, -1, 2)
    numbers = pairs[..., 0] | (pairs[..., 1] << 4)
    return {name + _NUMBERS: numbers.contiguous(), name + _SCALE: blocks.scale, name + _OFFSET: blocks.offset}


def _widened(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by name, with int4 ones dequantized."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith((_NUMBERS, _SCALE, _OFFSET))}
    for name, pairs in tensors.items():
        if name.endswith(_NUMBERS):
            own = name.removesuffix(_NUMBERS)
            numbers = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)
            found[own] = QuantizedBlocks(INT4, numbers, tensors[own + _SCALE], tensors[own + _OFFSET]).widened()
    return found


def _turned(heads: torch.Tensor, angles: KeysAndValues) -> torch.Tensor:
    cosine, sine = angles
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def _rotary(stack: LayerStack) -> tuple[torch.Tensor, float] | None:
    """The frequencies and scale of the model's rotary embedding; None if it has no plain one."""
    for module in stack.model.modules():
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, torch.Tensor) and frequencies.dim() == 1:
            return frequencies.detach().float(), float(getattr(module, "attention_scaling", 1.0))
    return None


def head_of(plan: Plan) -> DraftHead | None:
    """The draft head stored with a loaded plan; None if the plan has no learned drafter."""
    if plan.draft_head is None:
        return None
    if plan.folder is None:
        raise DepthDecayError("the plan's draft head is in a file, but the plan was not loaded from a folder")
    return DraftHead.load(plan.folder / plan.draft_head)


def portable_head_of(plan: Plan) -> DraftHead | None:
    """The head in the format that other engines load, if one is stored with the plan."""
    file = None if plan.folder is None else plan.folder / PORTABLE_HEAD_FILE
    return DraftHead.load(file) if file is not None and file.is_file() else None


def final_norm(stack: LayerStack) -> torch.Tensor | None:
    """The weight of the norm after the last layer, if it is an RMSNorm; else None."""
    norm = getattr(stack.owner, "norm", None)
    if norm is None or not type(norm).__name__.endswith("RMSNorm"):
        return None
    with torch.no_grad():  # computed, not read: some models store the weight minus one
        weight: torch.Tensor = norm(torch.ones(stack.hidden_size, device=stack.model.device, dtype=stack.model.dtype))
    return weight
