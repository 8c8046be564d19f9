"""Control tokens spelled out in a message stay text; only the chat template writes real ones.

A template renders all messages into one string, and a tokenizer reads `<|im_end|>` in it as the end of a turn, whoever
wrote it. So each such text in a message is marked before rendering; the template may trim, split or drop around it as
usual. In the rendered string, marked texts belong to messages and all others to the template. The template's are
respelled unguessably, for a copy of the tokenizer whose control tokens have that spelling. The whole string goes
through the copy at once, so that everything else is tokenized as usual.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from depthdecay.errors import DepthDecayError

# Private-use characters: no template trims, escapes or changes the case of them.
_PRIVATE = range(0xF0000, 0xFFFFE)
_SPELLING = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(8))  # prefix of control tokens in the copy


class ControlTokens:
    """The control tokens of one tokenizer with a chat template.

    These are its special tokens, and other added tokens that the template spells out: some models mark turns with
    tokens that are not flagged as special.
    """

    def __init__(self, tokenizer: Any, added: Mapping[int, Any], template: str) -> None:
        self.tokenizer: Any = getattr(tokenizer, "backend_tokenizer", None)  # None without a fast tokenizer
        self.unknown = getattr(tokenizer, "unk_token_id", None)
        control = {number: token for number, token in added.items() if token.special or _is_mark(token, template)}
        self.ids = frozenset(control)
        self.texts = frozenset(token.content for token in control.values() if token.content)
        # Such tokens are matched in normalized text, where another spelling may turn into theirs.
        self.reads_normalized = any(token.normalized for token in control.values()) and (
            getattr(self.tokenizer, "normalizer", None) is not None
        )
        longest_first = sorted(self.texts, key=len, reverse=True)
        self.pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"  # (?!) matches nothing
        self.spelled = re.compile(self.pattern)

    def are_in(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a message contains any of them."""
        return any(self.spelled.search(text) or self._becomes_control(text) for text in _strings(messages))

    def _becomes_control(self, text: str) -> bool:
        if not self.reads_normalized or self.tokenizer is None:
            return False
        found = set(_encoded(self.tokenizer, text).ids)
        return bool(found & self.ids - {self.unknown})

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], render: Callable[[list[Any]], str]) -> list[int]:
        """The token ids of a conversation whose messages contain control tokens. `render`: the chat template."""
        mark = _unused_character(messages)
        chat = render([_marked(message, self.spelled, mark) for message in messages])
        own = 0

        def respelled(found: re.Match[str]) -> str:
            nonlocal own
            text = found[0].removeprefix(mark)
            if found[0] != text or not text:  # from a message, or a mark that the template separated from its text
                return text
            own += 1
            return _SPELLING + text

        ids = _encoded(self._copy, re.sub(f"{mark}?(?:{self.pattern})|{mark}", respelled, chat))
        control = [number for number in ids.ids if number in self._from_copy]
        forged = (set(ids.ids) - self._from_copy.keys()) & self.ids - {self.unknown}
        if forged or sum(self._from_copy[number] in self.ids for number in control) != own:
            raise DepthDecayError(
                "a message contains a control token that this tokenizer cannot encode as text; remove it, or allow "
                "control tokens in messages with control_tokens_in_content"
            )
        return [self._from_copy.get(number, number) for number in ids.ids]

    @cached_property
    def _copy(self) -> Any:
        """A copy of the tokenizer with respelled control tokens; built once, since that takes a moment."""
        if self.tokenizer is None:
            raise DepthDecayError(
                "a message contains a control token, and encoding it as text needs a fast tokenizer, which this model "
                "lacks; remove it, or allow control tokens in messages with control_tokens_in_content"
            )
        about = json.loads(self.tokenizer.to_str())
        for token in about["added_tokens"]:
            if token["id"] in self.ids:
                token["content"] = _SPELLING + token["content"]
        # The template adds BOS and the like, and nothing is truncated or padded.
        about["post_processor"] = about["truncation"] = about["padding"] = None
        return type(self.tokenizer).from_str(json.dumps(about))

    @cached_property
    def _from_copy(self) -> dict[int, int]:
        """Maps the copy's ids of added tokens to the original ids: the copy may renumber respelled tokens."""
        known = {token.content: number for number, token in self.tokenizer.get_added_tokens_decoder().items()}
        return {
            number: known[token.content.removeprefix(_SPELLING)]
            for number, token in self._copy.get_added_tokens_decoder().items()
        }


_known: WeakKeyDictionary[Any, tuple[Any, ControlTokens]] = WeakKeyDictionary()


def control_tokens(tokenizer: Any) -> ControlTokens:
    """The control tokens of a tokenizer in its current state: users add tokens and change templates."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    template = tokenizer.chat_template
    source = template if isinstance(template, str) else "\n".join(map(str, dict(template).values()))
    key = (source, tuple((number, token.content, token.special) for number, token in added.items()))
    kept = _known.get(tokenizer)
    if kept is None or kept[0] != key:
        kept = _known[tokenizer] = (key, ControlTokens(tokenizer, added, source))
    return kept[1]


def _is_mark(token: Any, template: str) -> bool:
    """Whether the template spells it out. Words and spaces are ordinary text, even as added tokens."""
    return token.content in template and re.search(r"[^\w\s]", token.content) is not None


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [text for part in value for text in _strings(part)]


def _marked(value: Any, spelled: re.Pattern[str], mark: str) -> Any:
    if isinstance(value, str):
        return spelled.sub(lambda found: mark + found[0], value)
    if isinstance(value, Mapping):
        return {name: _marked(part, spelled, mark) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(part, spelled, mark) for part in value]
    return value


def _unused_character(messages: Sequence[Mapping[str, Any]]) -> str:
    used = set("".join(_strings(messages)))
    return next(chr(number) for number in _PRIVATE if chr(number) not in used and chr(number) not in _SPELLING)


def _encoded(tokenizer: Any, text: str) -> Any:
    """As a batch of one: `encode` holds the GIL, so a long text would block every other thread."""
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]
