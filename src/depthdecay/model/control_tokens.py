"""Content is text: a control token that a message spells out stays text, and only the chat template writes real ones.

A template puts contents into one string, and a tokenizer reads `<|im_end|>` in it as the end of a turn, whoever wrote
it. So each such text in a message gets a mark before the template sees it, and the template may trim, split or drop
around it as it does otherwise. In what it renders, marked texts are the messages' and all others its own. Its own are
then spelled in a way that nobody can guess, for a copy of the tokenizer in which control tokens have that spelling.
The whole string goes through that copy at once, so that all else is tokenized just as it is without this.
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

# Private-use characters: no template trims them, changes their case or escapes them.
_PRIVATE = range(0xF0000, 0xFFFFE)
_SPELLING = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(8))  # of control tokens in the copy, before their text


class ControlTokens:
    """The control tokens of one tokenizer with a chat template.

    These are its special tokens, and other added tokens that the template spells out: some models have their turns
    marked by tokens that are not called special.
    """

    def __init__(self, tokenizer: Any, added: Mapping[int, Any], template: str) -> None:
        self.tokenizer: Any = getattr(tokenizer, "backend_tokenizer", None)  # None where there is no fast one
        self.unknown = getattr(tokenizer, "unk_token_id", None)
        control = {number: token for number, token in added.items() if token.special or _is_mark(token, template)}
        self.ids = frozenset(control)
        self.texts = frozenset(token.content for token in control.values() if token.content)
        # Such tokens are looked for in normalized text, where another spelling may have become theirs.
        self.reads_normalized = any(token.normalized for token in control.values()) and (
            getattr(self.tokenizer, "normalizer", None) is not None
        )
        longest_first = sorted(self.texts, key=len, reverse=True)
        self.pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"  # (?!) matches nothing
        self.spelled = re.compile(self.pattern)

    def are_in(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a message spells any of them out."""
        return any(self.spelled.search(text) or self._becomes_control(text) for text in _strings(messages))

    def _becomes_control(self, text: str) -> bool:
        if not self.reads_normalized or self.tokenizer is None:
            return False
        found = set(_encoded(self.tokenizer, text).ids)
        return bool(found & self.ids - {self.unknown})

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], render: Callable[[list[Any]], str]) -> list[int]:
        """The token ids of a conversation in which messages spell control tokens. `render`: the chat template."""
        mark = _unused_character(messages)
        chat = render([_marked(message, self.spelled, mark) for message in messages])
        own = 0

        def respelled(found: re.Match[str]) -> str:
            nonlocal own
            text = found[0].removeprefix(mark)
            if found[0] != text or not text:  # a message's, or a mark that the template has parted from its text
                return text
            own += 1
            return _SPELLING + text

        ids = _encoded(self._copy, re.sub(f"{mark}?(?:{self.pattern})|{mark}", respelled, chat))
        control = [number for number in ids.ids if number in self._from_copy]
        forged = (set(ids.ids) - self._from_copy.keys()) & self.ids - {self.unknown}
        if forged or sum(self._from_copy[number] in self.ids for number in control) != own:
            raise DepthDecayError(
                "a message spells a control token that this tokenizer cannot write as text; leave it out, or let "
                "messages have control tokens with control_tokens_in_content"
            )
        return [self._from_copy.get(number, number) for number in ids.ids]

    @cached_property
    def _copy(self) -> Any:
        """Of the tokenizer, with control tokens in their other spelling; made once, since that takes a moment."""
        if self.tokenizer is None:
            raise DepthDecayError(
                "a message spells a control token, and this tokenizer has no fast version that could read it as text; "
                "leave it out, or let messages have control tokens with control_tokens_in_content"
            )
        about = json.loads(self.tokenizer.to_str())
        for token in about["added_tokens"]:
            if token["id"] in self.ids:
                token["content"] = _SPELLING + token["content"]
        # What goes around a text is the template's business, and nothing is cut or filled up.
        about["post_processor"] = about["truncation"] = about["padding"] = None
        return type(self.tokenizer).from_str(json.dumps(about))

    @cached_property
    def _from_copy(self) -> dict[int, int]:
        """Added tokens' ids by those that the copy gives them: what it has respelled it may have counted anew."""
        known = {token.content: number for number, token in self.tokenizer.get_added_tokens_decoder().items()}
        return {
            number: known[token.content.removeprefix(_SPELLING)]
            for number, token in self._copy.get_added_tokens_decoder().items()
        }


_known: WeakKeyDictionary[Any, tuple[Any, ControlTokens]] = WeakKeyDictionary()


def control_tokens(tokenizer: Any) -> ControlTokens:
    """Those of a tokenizer as it is now: people add tokens and change templates."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    template = tokenizer.chat_template
    source = template if isinstance(template, str) else "\n".join(map(str, dict(template).values()))
    key = (source, tuple((number, token.content, token.special) for number, token in added.items()))
    kept = _known.get(tokenizer)
    if kept is None or kept[0] != key:
        kept = _known[tokenizer] = (key, ControlTokens(tokenizer, added, source))
    return kept[1]


def _is_mark(token: Any, template: str) -> bool:
    """Whether the template spells it out; words and spaces are ordinary text, also where they are added tokens."""
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
    """As a batch of one: `encode` holds the interpreter's lock, and long texts would stop every other thread."""
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]
