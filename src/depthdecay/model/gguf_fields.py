"""A GGUF file's tokenizer fields, with llama.cpp's defaults where a field is missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from depthdecay.errors import DepthDecayError, UnsupportedModelError
from depthdecay.model.gguf_splits import LINES, SPLITS, UNNAMED, UNNAMED_SPLIT, WordSplit

# llama.cpp's token types.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

Kind = Literal["llama", "gpt2", "gemma4"]  # merges by score, byte-level BPE, and BPE on text with ▁ for spaces
_KINDS = ("llama", "gpt2", "gemma4")
# llama.cpp ends generation at the tokens of these keys, and at control tokens with one of these texts.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
    *("<|eom_id|>", "<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
    "<｜end▁of▁sentence｜>",
}


@dataclass(frozen=True)
class TokenizerFields:
    """The `tokenizer.*` fields of a file, complete and checked."""

    kind: Kind
    pre: str
    split: WordSplit
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: list[int]
    adds_bos: bool
    adds_eos: bool
    adds_space: bool  # before each text and after each special token
    chat_template: str | None

    @classmethod
    def of(cls, reader: Any, path: Path) -> TokenizerFields:
        def field(key: str, default: Any = None) -> Any:
            return metadata(reader, f"tokenizer.ggml.{key}", default)

        kind = field("model", "none")
        if kind not in _KINDS:
            raise UnsupportedModelError(
                f"the GGUF file '{path}' (architecture '{metadata(reader, 'general.architecture', 'unknown')}') has a "
                f"tokenizer of kind '{kind}'; supported are {', '.join(_KINDS)}; "
                f"use the model's safetensors version instead"
            )
        # Ids without text are never encoded or decoded, but each needs a unique name.
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(field("tokens", []))]
        types = list(field("token_type", [])) or [1] * len(tokens)
        scores = list(field("scores", [])) or [0.0] * len(tokens)
        merges = [_pair(merge) for merge in field("merges", [])]
        sound = tokens and len(set(tokens)) == len(tokens) == len(types) == len(scores)
        if not sound or (kind != "llama" and not merges):
            raise DepthDecayError(
                f"the tokenizer of the GGUF file '{path}' is incomplete: {len(tokens):,} tokens "
                f"({len(set(tokens)):,} different ones), {len(types):,} types, {len(scores):,} scores and "
                f"{len(merges):,} merges; use another copy"
            )
        pre = field("pre", "")
        split = _split(kind, pre, path)

        def token_id(key: str, default: int | None = None) -> int | None:
            given = field(key, default)
            return int(given) if given is not None and 0 <= given < len(tokens) else None

        scored = kind == "llama"  # such files may omit sentencepiece's default ids
        bos = token_id("bos_token_id", 1 if scored else None)
        eos = token_id("eos_token_id", 2 if scored else None)
        named = [index for index, text in enumerate(tokens) if types[index] == CONTROL and text in _END_TEXTS]
        return cls(
            kind=cast(Kind, kind),
            pre=pre,
            split=split,
            tokens=tokens,
            types=types,
            scores=scores,
            merges=merges,
            bos=bos,
            eos=eos,
            unknown=token_id("unknown_token_id", 0 if scored else None),
            padding=token_id("padding_token_id"),
            ends=_unique([eos, *(token_id(key) for key in _END_KEYS), *named]),
            adds_bos=bool(field("add_bos_token", scored or split.adds_bos)) and bos is not None,
            adds_eos=bool(field("add_eos_token", False)) and eos is not None,
            adds_space=scored and bool(field("add_space_prefix", True)),
            chat_template=metadata(reader, "tokenizer.chat_template", None),
        )

    @property
    def names_no_split(self) -> bool:
        return self.kind == "gpt2" and self.pre in UNNAMED

    def text(self, index: int | None) -> str | None:
        return None if index is None else self.tokens[index]

    def of_type(self, *types: int) -> dict[str, int]:
        """Tokens of these types, with their ids."""
        return {self.tokens[index]: index for index, kind in enumerate(self.types) if kind in types}


def metadata(reader: Any, key: str, default: Any) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _split(kind: str, pre: str, path: Path) -> WordSplit:
    if kind != "gpt2":
        return LINES if kind == "gemma4" else WordSplit(())
    if pre in UNNAMED:
        return UNNAMED_SPLIT
    if pre not in SPLITS:
        raise UnsupportedModelError(
            f"the GGUF file '{path}' uses the pre-tokenizer '{pre}', which is not supported, and any other would "
            f"garble its prompts; use the model's safetensors version instead"
        )
    return SPLITS[pre]


def _pair(merge: str) -> tuple[str, str]:
    # From the second character on: the pair may itself begin with a space.
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _unique(ids: Iterable[int | None]) -> list[int]:
    return list(dict.fromkeys(index for index in ids if index is not None))
