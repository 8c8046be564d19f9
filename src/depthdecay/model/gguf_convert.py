"""Convert a GGUF file to an ordinary Hugging Face folder: weights, tokenizer, end-of-turn tokens."""

from __future__ import annotations

import io
import os
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthdecay.errors import DepthDecayError, UnsupportedModelError, one_line
from depthdecay.library_internals import gguf_looked_up_once, gguf_reader_class
from depthdecay.model import gguf_tokenizer
from depthdecay.model.gguf_fields import TokenizerFields, metadata
from depthdecay.patches import SharedPatch

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


_converting: dict[str, Any] = {}  # readers by file, while it is converted


def _read(path: str | os.PathLike[str]) -> Any:
    file = os.path.realpath(path)
    return _converting.get(file) or gguf_reader_class()(file)


_READING_ONCE = SharedPatch(lambda: gguf_looked_up_once(_read))


def read_checked(path: Path) -> Any:
    """The reader of a file, checked to contain every tensor that its header lists."""
    size = path.stat().st_size
    damaged = DepthDecayError(
        f"the GGUF file '{path}' is truncated or damaged: its header lists more than its {size:,} bytes contain; "
        f"download it again"
    )
    try:
        reader = gguf_reader_class()(path)
        end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=size + 1)
    except Exception as error:  # the reader trusts the file, so a truncated one can fail anywhere
        raise damaged from error
    if end > size:
        raise damaged
    parts = metadata(reader, "split.count", 1)
    if parts > 1:
        raise DepthDecayError(
            f"the GGUF file '{path}' is one of {parts} parts; merge them first with llama-gguf-split --merge"
        )
    return reader


def convert(path: Path, reader: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the dequantized model, its tokenizer and its generation defaults to `folder`."""
    from transformers import AutoModelForCausalLM, GgufConfig

    architecture = metadata(reader, "general.architecture", "unknown")
    fields = TokenizerFields.of(reader, path)
    # In a separate folder: transformers would mix in a configuration or adapter next to the file.
    # stderr is redirected because no transformers setting turns off its progress bar for GGUF tensors.
    with tempfile.TemporaryDirectory(prefix="depthdecay-") as lone, redirect_stderr(io.StringIO()):
        _link(path.resolve(), Path(lone, "model.gguf"))
        linked = os.path.realpath(Path(lone, "model.gguf"))
        _converting[linked] = reader
        try:
            with _READING_ONCE.made():
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
                f"model: {one_line(error)}; use the model's safetensors version instead"
            ) from error
        finally:
            _converting.pop(linked, None)
        if info["missing_keys"]:
            raise DepthDecayError(
                f"the GGUF file '{path}' lacks {len(info['missing_keys'])} of the tensors that its architecture "
                f"'{architecture}' needs, such as {min(info['missing_keys'])}; use another copy"
            )
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        # The weights are dequantized by now, but save_pretrained rejects any model loaded through a GGUF quantizer.
        quantizer.remove_quantization_config(model)
    model.config.name_or_path = path.name
    tokenizer = gguf_tokenizer.make_tokenizer(fields)
    ends = gguf_tokenizer.end_ids(tokenizer, fields)
    model.generation_config.eos_token_id = ends or model.generation_config.eos_token_id
    model.generation_config.bos_token_id = fields.bos
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _link(source: Path, target: Path) -> None:
    try:
        os.symlink(source, target)
    except OSError:  # Windows without permission to create symbolic links
        os.link(source, target)
