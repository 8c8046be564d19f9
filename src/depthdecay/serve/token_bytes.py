"""The bytes of a token: a character may span several tokens, none of which is valid text by itself."""

from __future__ import annotations

import functools
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte token of vocabularies with byte fallback


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes that the token adds to a text; where the vocabulary does not give them, its decoded text as UTF-8."""
    written = tokenizer.convert_ids_to_tokens(token)
    text = str(tokenizer.decode([token]))
    if isinstance(written, str) and "▁" in written:  # a space, which decoding a token by itself may drop
        text = written.replace("▁", " ")
    if not isinstance(written, str) or "\ufffd" not in text:
        return text.encode("utf-8", "replace")
    byte = _BYTE.fullmatch(written)
    if byte is not None:
        return bytes([int(byte.group(1), 16)])
    alphabet = _alphabet()
    if all(character in alphabet for character in written):
        return bytes(alphabet[character] for character in written)
    return text.encode("utf-8", "replace")


def token_name(said: bytes) -> str:
    """A token as OpenAI writes it: its text, or its bytes where they are not valid UTF-8."""
    try:
        return said.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in said)


@functools.cache
def _alphabet() -> dict[str, int]:
    """Byte-level vocabularies write every byte as a visible character: printable Latin-1 as it is, the others from
    U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + place): byte for place, byte in enumerate(rest)}
