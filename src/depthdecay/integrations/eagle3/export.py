"""`depthdecay export`: a plan's learned drafter as a folder that vLLM and SGLang load together with the model."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from depthdecay.errors import ArgumentError, DepthDecayError, UnsupportedModelError
from depthdecay.files import cache_folder, expanded, read_bytes
from depthdecay.integrations.eagle3.form import draft_config, draft_tensors
from depthdecay.model.layers import LayerStack
from depthdecay.model.load import as_loaded, load
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.model.weights_origin import WeightsOrigin
from depthdecay.plan.compatibility import check_plan
from depthdecay.plan.file import EMBEDDED_MODEL
from depthdecay.plan.plan import Plan
from depthdecay.plan.stored_plans import drafter_of
from depthdecay.speculative.draft_head import PORTABLE_HEAD_FILE, DraftHead

FORMATS = ("eagle3",)
DRAFTS = 3  # per verification by default, as EAGLE-3 heads are usually served
WEIGHTS_FILE, CONFIG_FILE, README_FILE = "model.safetensors", "config.json", "README.md"
_PRODUCER = "depthdecay export"
_FORM = 1  # increase when exported files change
_MADE_BY = "depthdecay calibrate --lossless makes one"
_FEWEST_LAYERS = 7  # with fewer, two of the layers 2, n // 2 and n - 3 coincide, and engines return each only once


def export(
    plan: Plan | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    model: str | LoadedModel = EMBEDDED_MODEL,
    format: str = "eagle3",
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    allow_other_weights: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Save a plan's learned drafter as a folder that vLLM and SGLang load together with `model`, which it drafts for.

        dd.export("plan", "head", model="Qwen/Qwen2.5-1.5B")

    The folder is written atomically. An earlier export is replaced; any other folder must be empty.
    """
    if format not in FORMATS:
        raise ArgumentError(f"format is {format!r}; expected {' or '.join(FORMATS)}", "format")
    folder = expanded(out).resolve()
    _refuse_what_is_not_ours(folder)
    stored = plan if isinstance(plan, Plan) else Plan.load(plan)
    head = portable_head(stored)
    loaded = as_loaded(
        model,
        device="cpu" if isinstance(model, str) else None,
        dtype=dtype,
        trust_remote_code=trust_remote_code or None,
        progress=progress,
    )
    check_plan(stored, loaded.model, allow_other_weights=allow_other_weights)
    return save_draft(head, LayerStack.of(loaded.model), folder, loaded.shown_name)


def cached_export(
    plan: Plan,
    model: str,
    *,
    trust_remote_code: bool = False,
    allow_other_weights: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """An export in our cache, created when these weights are first served with this drafter.

    An existing one is found from files alone, so that a server does not load its model twice.
    """
    drafter = hashlib.sha256(read_bytes(_head_file(plan), "the plan's drafter")).hexdigest()

    def place(origin: WeightsOrigin | None) -> Path:
        weights = model if origin is None else origin.key
        key = hashlib.sha256(repr((_FORM, drafter, weights, allow_other_weights)).encode()).hexdigest()[:24]
        return cache_folder() / "eagle3" / key

    here = expanded(model)
    origin = WeightsOrigin.of_folder(here, "auto") if here.is_dir() else WeightsOrigin.of_hub(model, "auto")
    folder = place(origin)
    if origin is not None and _is_ours(folder / WEIGHTS_FILE):
        return folder
    portable_head(plan)  # raises before the model is downloaded and loaded
    loaded = load(model, device="cpu", trust_remote_code=trust_remote_code, progress=progress)
    if origin is None:  # a Hub model that was only now downloaded
        folder = place(WeightsOrigin.of_hub(model, "auto"))
    return export(plan, folder, model=loaded, allow_other_weights=allow_other_weights)


def portable_head(plan: Plan) -> DraftHead:
    """The plan's drafter that other engines can run: one fitted for them, or else the one that lossless mode uses."""
    head = DraftHead.load(_head_file(plan))
    if plan.num_layers < _FEWEST_LAYERS:
        raise UnsupportedModelError(
            f"the model has {plan.num_layers} layers; engines feed EAGLE-3 from three of them, which needs at least "
            f"{_FEWEST_LAYERS}"
        )
    if not head.shape.is_portable(plan.num_layers):
        first, states = head.shape.first_layers, ", ".join(map(str, head.shape.states))
        why = f"builds on the model's first {first} layers" if first else f"reads the states after layers {states}"
        raise DepthDecayError(f"the plan's drafter {why}, which other engines do not; {_MADE_BY} that they can run")
    return head


def _head_file(plan: Plan) -> Path:
    places = [(place.folder, place) for place in (drafter_of(plan), plan)]
    fitted = [folder / PORTABLE_HEAD_FILE for folder, _ in places if folder is not None]
    own = [folder / place.draft_head for folder, place in places if folder is not None and place.draft_head is not None]
    found = [*(file for file in fitted if file.is_file()), *own]
    if not found:
        raise DepthDecayError(f"the plan has no learned drafter to export; {_MADE_BY}")
    return found[0]


def save_draft(head: DraftHead, stack: LayerStack, folder: Path, model_name: str) -> Path:
    """Save configuration, weights, and a README that shows how to start engines with them."""
    from safetensors.torch import save

    head.shape.check(stack)
    files = {
        WEIGHTS_FILE: save(draft_tensors(head, stack), {"format": "pt", "producer": _PRODUCER}),
        CONFIG_FILE: (json.dumps(draft_config(head, stack), indent=2) + "\n").encode(),
        README_FILE: _page(model_name, folder.name).encode(),
    }
    try:
        with _made_aside(folder) as aside:
            for name, content in files.items():
                (aside / name).write_bytes(content)
    except OSError as error:
        raise DepthDecayError(f"the drafter cannot be written to '{folder}': {error.strerror or error}") from None
    return folder


@contextmanager
def _made_aside(folder: Path) -> Iterator[Path]:
    """A temporary folder that replaces `folder` once its files are on disk, so that nobody loads an incomplete one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as place:
        made, before = Path(place, "made"), Path(place, "before")
        made.mkdir()
        yield made
        for file in made.iterdir():
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())
        _refuse_what_is_not_ours(folder)  # checked again, since loading the model took a while
        if folder.exists():
            folder.rename(before)
        try:
            made.rename(folder)
        except OSError:
            if before.exists():
                before.rename(folder)
            raise


def _refuse_what_is_not_ours(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ArgumentError(f"out is '{folder}', which is a file; expected a folder", "out")
    found = {entry.name for entry in folder.iterdir()}
    others = found - {WEIGHTS_FILE, CONFIG_FILE, README_FILE}
    if found and (others or not _is_ours(folder / WEIGHTS_FILE)):
        raise ArgumentError(
            f"out is '{folder}', which contains {min(others or found)}; give a new or empty folder, or one with an "
            "earlier export, which is replaced",
            "out",
        )


def _is_ours(file: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as content:
            return (content.metadata() or {}).get("producer") == _PRODUCER
    except (OSError, SafetensorError):
        return False


def _page(model: str, folder: str) -> str:
    drafts = json.dumps({"method": "eagle3", "model": folder, "num_speculative_tokens": DRAFTS})
    return f"""# A drafter for {model}

An EAGLE-3 head, made by `{_PRODUCER}`. It drafts and {model} verifies, so the answers are {model}'s own.
It works only with the weights that it was made for. Replace `{folder}` with the path of this folder.

vLLM:

    vllm serve {model} --speculative-config '{drafts}'

SGLang:

    python -m sglang.launch_server --model-path {model} --speculative-algorithm EAGLE3 \\
      --speculative-draft-model-path {folder} --speculative-num-steps {DRAFTS} --speculative-eagle-topk 1 \\
      --speculative-num-draft-tokens {DRAFTS + 1}

It has no embeddings: engines share the model's. In vLLM this needs a pipeline-parallel size of 1.
"""
