"""A tiny random chat model on disk with a byte-level tokenizer, for tests of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<pad>", "<s>", "</s>"]


def save_tiny_chat_model(folder: Path, *, chat: bool = True, seed: int = 0, **changes: Any) -> str:
    """Save it and return the path for the command line."""
    model = tiny_model("llama", seed=seed, vocab_size=len(SPECIAL) + len(BYTES), **changes)
    model.save_pretrained(folder)
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    if chat:
        fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return str(folder)
