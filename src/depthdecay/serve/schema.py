"""The request schema. Unknown parameters are refused by name, never ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

MOST_CHOICES = 16
MOST_TOP_LOGPROBS = 20
MOST_STOPS = 4
MOST_PROMPTS = 128
MOST_MESSAGES = 2048  # as OpenAI's own API
MOST_IDS = 2**20  # the server's context limit, which is lower, is checked before the ids are used
MOST_FIELDS = 64  # per object; each unknown field would produce an error of its own
MOST_BIASES = 1024
LONGEST_STOP = 1024  # characters; every new piece of text is compared with all stop strings
LONGEST_NAME = 1024
_SEED = 2**63

Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Lists fail at their first mistake: a body can hold some 300,000 elements, and an error for each would take seconds.
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_IDS, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]

FORM = "form:"  # prefix of the tags of a value's forms, so that error messages can leave them out


def _form_of_stop(given: Any) -> str | None:
    return f"{FORM}text" if isinstance(given, str) else f"{FORM}texts" if isinstance(given, list) else None


def _form_of_prompt(given: Any) -> str | None:
    """Decided by the first element, so that a prompt is checked against one form only, and errors refer to that."""
    if isinstance(given, list) and given and not isinstance(given[0], str):
        return f"{FORM}lists of ids" if isinstance(given[0], list) else f"{FORM}ids"
    return _form_of_stop(given)


def _form_of_content(given: Any) -> str | None:
    return f"{FORM}text" if isinstance(given, str) else f"{FORM}parts" if isinstance(given, list) else None


TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]  # JSON keys are strings
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def few(most: int) -> BeforeValidator:
    """Limit an object with arbitrary keys. Counted first, since each entry may produce an error of its own."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > most:
            raise ValueError(f"has {len(given)} entries; expected at most {most}")
        return given

    return BeforeValidator(check)


def only(*values: Any) -> BeforeValidator:
    """For an unsupported parameter: accept only the values that have no effect, which some clients send anyway."""
    told = " or ".join(map(json.dumps, values))

    def check(given: Any) -> Any:
        if not any(type(given) is type(value) and given == value for value in values):  # false is not 0
            raise PydanticCustomError("not_supported", "is not supported; omit it or set it to {told}", {"told": told})
        return given

    return BeforeValidator(check)


Nothing = Annotated[list[Any], Field(max_length=0), only([])]


class StrictModel(BaseModel):
    # Strict: "5" is not a number and true is not 1. Infinity and NaN are refused.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_says_nothing(cls, given: Any) -> Any:
        """As with OpenAI, null means that the parameter is left to the server."""
        if isinstance(given, dict) and len(given) > MOST_FIELDS:
            raise ValueError(f"an object has {len(given)} fields; expected at most {MOST_FIELDS}")
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class DepthRequest(StrictModel):
    """Depth settings for the answer's tokens; omitted ones use the server's defaults."""

    mode: Literal["full", "decay", "lossless"] | None = Field(
        None, description="lossless gives the same answer as full depth, with speculative decoding where that pays."
    )
    alpha: float | None = Field(None, gt=0, le=1, description="Token i runs floor(L·alpha^i) layers.")
    speedup: float | None = Field(None, ge=1, le=1000, description="Layers at full depth divided by layers executed.")
    over_tokens: int | None = Field(None, ge=1, le=2**20, description="Tokens that speedup is averaged over.")
    depths: bool = Field(False, description="Return the depth of every token.")

    @model_validator(mode="after")
    def _one_meaning(self) -> DepthRequest:
        if self.alpha is not None and self.speedup is not None:
            raise ValueError("alpha and speedup were given together; each sets the depth, so use only one")
        if self.over_tokens is not None and self.speedup is None:
            raise ValueError("over_tokens was given without speedup, which it is for")
        if self.mode in ("full", "lossless") and (self.alpha is not None or self.speedup is not None):
            raise ValueError(f"mode {self.mode} runs every layer; alpha and speedup are for mode decay")
        return self


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: Annotated[Literal[False] | None, only(False)] = None


class TextFormat(StrictModel):
    type: Literal["text"]


class Asked(StrictModel):
    """Parameters shared by completions and chat completions."""

    model: str | None = Field(
        None, max_length=LONGEST_NAME, description="The served model's name, as returned by /v1/models."
    )
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    frequency_penalty: Penalty | None = Field(None, description="Subtracted per occurrence of a token in the answer.")
    presence_penalty: Penalty | None = Field(None, description="Subtracted once per token that occurs in the answer.")
    logit_bias: Annotated[dict[TokenName, Bias] | None, few(MOST_BIASES)] = Field(
        None, description="Values added to logits, by token id."
    )
    stop: (
        Annotated[
            Annotated[Stop, Tag(f"{FORM}text")]
            | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True), Tag(f"{FORM}texts")],
            Discriminator(_form_of_stop, "not_a_stop", "expected a string or a list of strings"),
        ]
        | None
    ) = None
    seed: int | None = Field(None, ge=-_SEED, lt=_SEED)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Not used.")
    depth_decay: DepthRequest = DepthRequest.model_validate({})

    def token_biases(self) -> dict[int, float] | None:
        return None if self.logit_bias is None else {int(token): bias for token, bias in self.logit_bias.items()}

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options was given without stream")
        return self


class CompletionRequest(Asked):
    prompt: Annotated[
        Annotated[Text, Tag(f"{FORM}text")]
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True), Tag(f"{FORM}texts")]
        | Annotated[TokenIds, Tag(f"{FORM}ids")]
        | Annotated[
            list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True), Tag(f"{FORM}lists of ids")
        ],
        Discriminator(_form_of_prompt, "not_a_prompt", "expected a string, strings, token ids, or lists of token ids"),
    ]
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES, description="Must equal n.")
    echo: Annotated[Literal[False] | None, only(False)] = None
    suffix: Annotated[Literal[""] | None, only("")] = None

    @model_validator(mode="after")
    def _all_are_told(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of is {self.best_of} and n is {self.n}; all choices are returned, so give only n")
        return self

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag(f"{FORM}text")]
        | Annotated[list[TextPart], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), Tag(f"{FORM}parts")],
        Discriminator(_form_of_content, "not_a_content", "expected a string or a list of parts of type text"),
    ]
    # Fields of an answer that clients send back with it.
    annotations: Nothing | None = None
    tool_calls: Nothing | None = None

    def plain(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatRequest(Asked):
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="The newer name of max_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    tools: Nothing | None = None
    tool_choice: Annotated[Literal["none", "auto"] | None, only("none", "auto")] = None
    parallel_tool_calls: bool | None = Field(None, description="Not used: there are no tools.")
    functions: Nothing | None = None
    function_call: Annotated[Literal["none", "auto"] | None, only("none", "auto")] = None
    response_format: Annotated[TextFormat | None, only({"type": "text"})] = None
    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1, max_length=1), only(["text"])] = None
    verbosity: Annotated[Literal["medium"] | None, only("medium")] = None
    service_tier: Annotated[Literal["auto", "default"] | None, only("auto", "default")] = None
    store: Annotated[Literal[False] | None, only(False)] = None
    metadata: Annotated[dict[str, str] | None, few(MOST_FIELDS)] = Field(
        None, description="Not used: nothing is stored."
    )
    safety_identifier: str | None = Field(None, description="Not used.")
    prompt_cache_key: str | None = Field(None, description="Not used.")

    @model_validator(mode="after")
    def _said_once(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are the same setting; use only one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs was given without logprobs")
        return self
