"""A GGUF file read, checked and written as an ordinary Hugging Face folder: weights, tokenizer, end-of-turn tokens."""

from __future__ import annotations

import io
import os
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthdecay.errors import DepthDecayError, UnsupportedModelError, one_line

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"
# The numbers of llama.cpp's token types.
_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
# llama.cpp ends a generation at each of these.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_checked(path: Path) -> Any:
    """A `gguf.GGUFReader` of a file that holds every tensor its header names."""
    import gguf

    size = path.stat().st_size
    damaged = DepthDecayError(
        f"the GGUF file '{path}' is truncated or damaged: {size:,} bytes do not hold what its header names; "
        f"download it again"
    )
    try:
        reader = gguf.GGUFReader(path)
        end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=size + 1)
    except Exception as error:  # the reader trusts the file, so a cut one fails in whatever it does next
        raise damaged from error
    if end > size:
        raise damaged
    parts = _metadata(reader, "split.count", 1)
    if parts > 1:
        raise DepthDecayError(
            f"the GGUF file '{path}' is one of {parts} parts; merge them first with llama-gguf-split --merge"
        )
    return reader


def convert(path: Path, reader: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the dequantised model, its tokenizer and its generation defaults into `folder`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    architecture = _metadata(reader, "general.architecture", "unknown")
    # A folder of its own: a tokenizer.json or an adapter that lies beside the file would be mixed in.
    # transformers' bar for GGUF tensors obeys none of its switches, hence the redirection.
    with tempfile.TemporaryDirectory(prefix="depthdecay-") as lone, redirect_stderr(io.StringIO()):
        _link(path.resolve(), Path(lone, "model.gguf"))
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                lone,
                gguf_file="model.gguf",
                dtype=dtype,
                # Otherwise the weights may stay packed, which cannot be saved.
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
        except (ValueError, KeyError, NotImplementedError, AttributeError, RuntimeError) as error:
            raise UnsupportedModelError(
                f"transformers cannot load the GGUF file '{path}' (architecture '{architecture}') as a causal language "
                f"model: {one_line(error)}; give the model's safetensors version instead"
            ) from error
        if info["missing_keys"]:
            raise DepthDecayError(
                f"the GGUF file '{path}' lacks {len(info['missing_keys'])} of the tensors that its architecture "
                f"'{architecture}' needs, such as {min(info['missing_keys'])}; take another copy"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(lone, gguf_file="model.gguf")
        except Exception as error:  # converters index freely into the metadata
            raise UnsupportedModelError(
                f"transformers cannot read the tokenizer of the GGUF file '{path}' (architecture '{architecture}'): "
                f"{one_line(error)}; give the model's safetensors version instead"
            ) from error
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        # The weights are plain by now, but save_pretrained refuses whatever was read through a GGUF quantizer.
        quantizer.remove_quantization_config(model)
    model.config.name_or_path = path.name
    ends = repair_tokenizer(tokenizer, reader)
    model.generation_config.eos_token_id = ends or model.generation_config.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def repair_tokenizer(tokenizer: Any, reader: Any) -> list[int]:
    """Give the tokenizer what the file says of it, and return the ids that end an answer.

    transformers 5.17 takes the beginning of sentence for the end of SmolLM2's, and no version reads all the keys.
    """
    tokens: list[str] = _metadata(reader, "tokenizer.ggml.tokens", [])
    types: list[int] = _metadata(reader, "tokenizer.ggml.token_type", [])
    marked = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    }
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    # A control token that is unknown as such would be spelt out in pieces, and shown in the text.
    control = [
        token
        for token, index in marked.items()
        if types[index] == _CONTROL and token not in known and tokenizer.convert_tokens_to_ids(token) == index
    ]
    tokenizer.add_tokens(control, special_tokens=True)
    # Cleaning would take spaces out of the text; both places, since the second is what gets saved.
    tokenizer.clean_up_tokenization_spaces = tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    for name, key in _SPECIAL_TOKENS.items():
        index = _metadata(reader, key, None)
        if index is not None and 0 <= index < len(tokens):
            setattr(tokenizer, name, tokens[index])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not tokenizer.chat_template:
        tokenizer.chat_template = _metadata(reader, "tokenizer.chat_template", None)
    ends = [_metadata(reader, key, None) for key in _END_KEYS]
    ends.append(end_of_turn(tokenizer, marked))
    return list(dict.fromkeys(int(index) for index in ends if index is not None))


def end_of_turn(tokenizer: Any, marked: dict[str, int]) -> int | None:
    """The id of the token that the chat template writes behind an assistant's answer, if it is one token."""
    if not tokenizer.chat_template:
        return None
    answer = "Zanzibar"
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is a program from the file; without this token the file's own EOS remains
        return None
    _, found, behind = text.rpartition(answer)
    behind = behind.lstrip()
    endings = [token for token in marked if token and behind.startswith(token)]
    return marked[max(endings, key=len)] if found and endings else None


def _metadata(reader: Any, key: str, default: Any) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _link(source: Path, target: Path) -> None:
    try:
        os.symlink(source, target)
    except OSError:  # Windows without the right to make symbolic links
        os.link(source, target)
