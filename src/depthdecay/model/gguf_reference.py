"""Compare a loaded tokenizer with its GGUF file: by its fields, and by a tokenizer that shares no code with it.

Everything the engine is compared with runs on the same tokens, so a missing BOS would go unnoticed. Here the file is
read again, and a few lines of slow, plain Python tokenize as llama.cpp does.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from depthdecay.errors import DepthDecayError
from depthdecay.model import gguf_tokenizer
from depthdecay.model.gguf_fields import CONTROL, UNKNOWN, USER_DEFINED, TokenizerFields
from depthdecay.model.prompts import chat_ids

TEXTS = (
    "The capital of France is",
    " a space first, and two last  ",
    "two  three   four    spaces",
    "a tab\tand\nlines\r\n\n\n  indented",
    "def square(x):\n    return x ** 2  # of x\n",
    "x = {'a': [1, 2.5e-3], \"b\": None}; y += 0xFF",
    "In 1999, 12345678 people paid $3.50 each.",
    "I'll say they've DON'T we'D",
    "CamelCase snake_case HTTPServer2 ----====",
    "https://example.com/a?b=c&d=%20#e",
    "naïve café Übergröße",
    "Привет, мир! Ёлка",
    "你好，世界。这是测试",
    "こんにちは 世界 ｶﾅ",
    "안녕하세요 세계",
    "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया १२३",
    "🚀🦙 👩‍👩‍👧 e\u0301",
    "IV ³ ½ Ⅻ ① µ",
    "\u00a0hard\u200bzero\u3000wide",
    "   ",
    "\n\n\t\t \n",
)


def read_fields(path: Path) -> TokenizerFields:
    import gguf

    return TokenizerFields.of(gguf.GGUFReader(path), path)


class ReferenceTokenizer:
    """Tokenizes using only the file's fields."""

    def __init__(self, fields: TokenizerFields) -> None:
        import regex

        self.fields = fields
        self.ids = {token: index for index, token in enumerate(fields.tokens)}
        self.ranks = {pair: rank for rank, pair in reversed(list(enumerate(fields.merges)))}
        self.patterns = [regex.compile(pattern) for pattern in fields.split.patterns]
        special = fields.of_type(CONTROL, USER_DEFINED, UNKNOWN)
        # Longest first, since the first alternative that matches wins.
        self.special = regex.compile("|".join(map(regex.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def encode(self, text: str) -> list[int]:
        """The text's ids, without BOS and EOS."""
        ids: list[int] = []
        at = 0
        for found in self.special.finditer(text):
            ids += [*self._plain(text[at : found.start()]), self.ids[found[0]]]
            at = found.end()
        return ids + self._plain(text[at:])

    def _plain(self, text: str) -> list[int]:
        """The ids of text without special tokens."""
        if not text:
            return []
        if self.fields.kind != "gpt2":
            text = (" " + text if self.fields.adds_space else text).replace(" ", "▁")
        if self.fields.kind == "llama":
            return self._spelled(_merged(list(text), self._by_score))
        if self.fields.split.composes:
            text = unicodedata.normalize("NFC", text)
        return [index for word in self._words(text) for index in self._word(word)]

    def _words(self, text: str) -> list[str]:
        pieces = [text]
        for pattern in self.patterns:
            pieces = [part for piece in pieces for part in _cut(piece, pattern)]
        return pieces

    def _word(self, word: str) -> list[int]:
        if self.fields.kind == "gpt2":
            word = "".join(_BYTE_LETTERS[byte] for byte in word.encode())
        if word in self.ids and (self.fields.split.whole_words or not word.strip("\n")):
            return [self.ids[word]]
        return self._spelled(_merged(list(word), self._by_rank))

    def _by_score(self, left: str, right: str) -> float | None:
        index = self.ids.get(left + right)
        return None if index is None else -self.fields.scores[index]

    def _by_rank(self, left: str, right: str) -> float | None:
        return self.ranks.get((left, right))

    def _spelled(self, pieces: list[str]) -> list[int]:
        """The pieces' ids. A piece that is not a token falls back to bytes, or to unknown if the file lacks those."""
        ids: list[int] = []
        for piece in pieces:
            spelling = [f"<0x{byte:02X}>" for byte in piece.encode()]
            if piece in self.ids:
                ids.append(self.ids[piece])
            elif all(byte in self.ids for byte in spelling):
                ids += [self.ids[byte] for byte in spelling]
            elif self.fields.unknown is not None and self.fields.kind != "gpt2" and ids[-1:] != [self.fields.unknown]:
                ids.append(self.fields.unknown)
        return ids


def _merged(pieces: list[str], cost: Callable[[str, str], float | None]) -> list[str]:
    """Merge neighbours, cheapest pair first and leftmost on a tie, until no pair has a cost."""
    while True:
        costs = [(cost(a, b), at) for at, (a, b) in enumerate(itertools.pairwise(pieces))]
        best = min(((price, at) for price, at in costs if price is not None), default=None)
        if best is None:
            return pieces
        at = best[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def _cut(text: str, pattern: Any) -> Iterator[str]:
    """The pattern's matches, and the text between them."""
    at = 0
    for found in pattern.finditer(text):
        yield from (piece for piece in (text[at : found.start()], found[0]) if piece)
        at = found.end()
    if at < len(text):
        yield text[at:]


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable bytes map to themselves, others to letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_LETTERS = _byte_letters()


# Each function lists the differences in words; the list is empty if the tokenizer matches the file.


def vocabulary_differences(tokenizer: Any, fields: TokenizerFields) -> list[str]:
    found = tokenizer.convert_ids_to_tokens(list(range(len(fields.tokens))))
    differences = [
        f"id {index} is {got!r}, in the file {wanted!r}"
        for index, (got, wanted) in enumerate(zip(found, fields.tokens, strict=True))
        if got != wanted
    ]
    if len(tokenizer) != len(fields.tokens):
        differences.append(f"{len(tokenizer):,} tokens, in the file {len(fields.tokens):,}")
    return differences


def special_token_differences(tokenizer: Any, generation_config: Any, fields: TokenizerFields) -> list[str]:
    return [
        *_added_around_text(tokenizer, fields),
        *_named_ids(tokenizer, fields),
        *_control_tokens(tokenizer, fields),
        *_ends(generation_config, fields),
    ]


def template_differences(tokenizer: Any, fields: TokenizerFields) -> list[str]:
    wanted, found = fields.chat_template, tokenizer.chat_template
    if found == wanted:
        with_bos = False
    elif wanted and found == gguf_tokenizer.BOS_FIRST + wanted:
        with_bos = True
    else:
        return ["the chat template is not the file's"]
    if not wanted or not fields.adds_bos:
        return ["the chat template writes a BOS that the file does not want"] if with_bos else []
    try:
        ids = chat_ids(tokenizer, [{"role": "user", "content": "Where?"}])
    except DepthDecayError:
        return []  # the template rejects these messages
    first = sum(1 for _ in itertools.takewhile(lambda index: index == fields.bos, ids))
    return [] if first == 1 else [f"a conversation begins with {first or 'no'} BOS, but the file wants one"]


def text_differences(tokenizer: Any, fields: TokenizerFields) -> tuple[list[str], int]:
    """The texts that are tokenized differently from the file, and the total number of tokens."""
    reference = ReferenceTokenizer(fields)
    between = [f"before{token} after" for token in itertools.islice(fields.of_type(CONTROL, USER_DEFINED), 2)]
    differences, total = [], 0
    for text in (*TEXTS, *between):
        wanted = reference.encode(text)
        found = tokenizer.encode(text, add_special_tokens=False)
        total += len(wanted)
        if found != wanted:
            at = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(found, wanted, strict=False)))
            differences.append(
                f"{text!r} is {_pieces(found, at, fields)} from token {at} on, not {_pieces(wanted, at, fields)}"
            )
    return differences, total


def _added_around_text(tokenizer: Any, fields: TokenizerFields) -> list[str]:
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    bos, eos = ([fields.bos] if fields.adds_bos else []), ([fields.eos] if fields.adds_eos else [])
    if whole == [*bos, *bare, *eos]:
        return []
    wanted = f"{'BOS' if bos else 'no BOS'} and {'EOS' if eos else 'no EOS'}"
    return [f"'a' becomes {_pieces(whole, 0, fields)}; the file wants {wanted} around {_pieces(bare, 0, fields)}"]


def _named_ids(tokenizer: Any, fields: TokenizerFields) -> list[str]:
    named = {
        **{"bos_token_id": fields.bos, "eos_token_id": fields.eos},
        **{"unk_token_id": fields.unknown, "pad_token_id": fields.padding},
    }
    found = {name: getattr(tokenizer, name) for name in named}
    return [
        f"{name} is {found[name]}, in the file {index}"
        for name, index in named.items()
        if index is not None and found[name] != index
    ]


def _control_tokens(tokenizer: Any, fields: TokenizerFields) -> list[str]:
    control = fields.of_type(CONTROL)
    differences = [
        f"{text!r} is not read as the token {index}"
        for text, index in {**control, **fields.of_type(USER_DEFINED)}.items()
        if tokenizer.encode(text, add_special_tokens=False) != [index]
    ]
    shown = tokenizer.decode(list(control.values()), skip_special_tokens=True).strip()
    return [*differences, *([f"control tokens are shown as text: {shown[:40]!r}"] if shown else [])]


def _ends(generation_config: Any, fields: TokenizerFields) -> list[str]:
    given = generation_config.eos_token_id
    known = set(given) if isinstance(given, list) else {given}
    return [f"{fields.text(index)!r} does not end an answer" for index in fields.ends if index not in known]


def _pieces(ids: list[int], start: int, fields: TokenizerFields) -> str:
    shown = [fields.tokens[index] if index < len(fields.tokens) else f"id {index}" for index in ids[start : start + 4]]
    return repr(shown)
