"""Tiny GGUF files with random weights and a small vocabulary, one for each family of tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 4, 4, 2, 8

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TURNS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

_BYTE_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
_MERGES = [
    "Ġ t",
    "h e",
    "Ġt he",
    "i n",
    "1 2",
    "12 3",
    "Ġ Ġ",
    "ĠĠ ĠĠ",
    "Ċ Ċ",
    "' l",
    "'l l",
    "Ġ 1",
    "a n",
    "Ġ an",
    "Ġan d",
]
_PIECES = [
    "▁t",
    "he",
    "▁the",
    "in",
    "12",
    "123",
    "▁▁",
    "▁▁▁▁",
    "an",
    "▁an",
    "▁and",
    "'l",
    "'ll",
    "▁1",
    "capital",
    "cap",
    "it",
    "al",
    "ital",
]
_CHARACTERS = list("▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,'!?()=*")


def byte_level(writer: Any, pre: str, special: list[tuple[str, int]]) -> None:
    """A vocabulary of bytes, a few merges, then the special tokens."""
    merged = [merge.replace(" ", "") for merge in _MERGES]
    tokens = [(letter, NORMAL) for letter in _BYTE_LETTERS] + [(token, NORMAL) for token in merged] + special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_merges(_MERGES)


def scored(writer: Any, special: list[tuple[str, int]]) -> None:
    """A sentencepiece vocabulary: the special tokens, bytes, characters, and pieces with scores."""
    tokens = [*special, *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
    tokens += [(character, NORMAL) for character in _CHARACTERS] + [(piece, NORMAL) for piece in _PIECES]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_scores([0.0 if kind != NORMAL else -float(index) for index, (_, kind) in enumerate(tokens)])


def _llama_spm(writer: Any) -> None:
    scored(writer, [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


def _gemma3(writer: Any) -> None:
    special = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
    special += [("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL), ("\n\n", USER_DEFINED), ("  ", USER_DEFINED)]
    scored(writer, special)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_eot_token_id(5)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(GEMMA_TURNS)


def _llama_bpe(writer: Any) -> None:
    first = len(_BYTE_LETTERS) + len(_MERGES)
    byte_level(
        writer, "llama-bpe", [("<|begin_of_text|>", CONTROL), ("<|end_of_text|>", CONTROL), ("<|eot_id|>", CONTROL)]
    )
    writer.add_bos_token_id(first)  # whether it is added follows from the pre-tokenizer's name
    writer.add_eos_token_id(first + 1)
    writer.add_eot_token_id(first + 2)


def _qwen2(writer: Any) -> None:
    first = len(_BYTE_LETTERS) + len(_MERGES)
    special = [("<|endoftext|>", CONTROL), ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)]
    byte_level(writer, "qwen2", [*special, ("<tool_call>", USER_DEFINED)])
    writer.add_bos_token_id(first)
    writer.add_eos_token_id(first + 2)
    writer.add_pad_token_id(first)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


FAMILIES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "llama-spm": ("llama", _llama_spm),
    "gemma3": ("gemma3", _gemma3),
    "llama-bpe": ("llama", _llama_bpe),
    "qwen2": ("qwen2", _qwen2),
}


def save_tiny_gguf(path: Path, family: str = "llama-spm", change: Callable[[Any], None] | None = None) -> Path:
    """A complete file. `change` adds tokenizer fields or overrides those already written."""
    architecture, describe = FAMILIES[family]
    writer = gguf.GGUFWriter(path, architecture)
    describe(writer)
    if change is not None:
        change(writer)
    _add_shape(writer, architecture)
    vocabulary = len(writer.kv_data[0]["tokenizer.ggml.tokens"].value)
    draw = np.random.default_rng(0)
    for name, shape in _shapes(architecture, vocabulary).items():
        ones = np.ones(shape, np.float32)
        writer.add_tensor(name, ones if len(shape) == 1 else draw.normal(0, 0.2, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: Any, architecture: str) -> None:
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if architecture == "gemma3":
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
        writer.add_sliding_window(16)
    else:
        writer.add_rope_dimension_count(HEAD_DIM)


def _shapes(architecture: str, vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if architecture != "gemma3":
        shapes["output.weight"] = (vocabulary, HIDDEN)
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if architecture == "qwen2":
            block |= {f"attn_{which}.bias": (block[f"attn_{which}.weight"][0],) for which in "qkv"}
        if architecture == "gemma3":
            block |= {f"attn_{which}_norm.weight": (HEAD_DIM,) for which in "qk"}
            block |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes
