"""Plan files: locate a plan, read its JSON, and write it atomically."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from depthdecay.errors import DepthDecayError
from depthdecay.files import write_whole

PLAN_FILE = "plan.json"
DEFAULT = "default"
EMBEDDED_MODEL = "smollm2-135m"  # comes with the package, with a calibrated plan
SHIPPED_PLANS = Path(__file__).parents[1] / "data"  # one folder per plan, named after the model
EMBEDDED_PLAN = SHIPPED_PLANS / EMBEDDED_MODEL
_HUB_SECONDS = 10.0
_REPOSITORY_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def save_plan_file(values: dict[str, Any], path: Path) -> Path:
    """Write to a .json path itself; any other path becomes a folder that holds plan.json."""
    try:
        file = path if path.suffix == ".json" and not path.is_dir() else path / PLAN_FILE
    except OSError as error:
        raise DepthDecayError(f"the plan cannot be written to {_short(path)}: {error.strerror or error}") from None
    try:
        # One line per field: a drop order stays readable, and a diff shows which part changed.
        lines = [f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False, allow_nan=False)}" for k, v in values.items()]
        content = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DepthDecayError(f"the plan cannot be written as JSON: {error}") from None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(file, content)
    except OSError as error:
        raise DepthDecayError(f"the plan cannot be written to {_short(file)}: {error.strerror or error}") from None
    except ValueError:  # a NUL byte or a lone surrogate
        raise DepthDecayError(f"the plan cannot be written to {_short(file)}: not a valid file name") from None


def read_plan_file(path: str) -> tuple[Path, Any]:
    """The file that holds the plan, and its parsed JSON."""
    file = _locate(path)
    try:
        return file, json.loads(file.read_bytes().decode("utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise DepthDecayError(f"{file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DepthDecayError(f"{file} is not UTF-8 text; expected a plan in JSON") from None
    except (ValueError, RecursionError) as error:
        raise DepthDecayError(f"{file} is not JSON ({error}); expected a plan") from None


def fetch_beside(path: str, file: Path, name: str) -> None:
    """Download a file that a plan from the Hub names; a local plan has it already, or is rejected later."""
    if local_plan(path).exists() or (file.parent / name).exists():
        return
    from huggingface_hub import hf_hub_download

    from depthdecay.quiet_libraries import quiet_libraries

    try:
        with quiet_libraries(downloads=True):
            hf_hub_download(path, name)
    except Exception as error:  # as for the plan itself: every failure means the same to the user
        raise DepthDecayError(
            f"the plan of {path} names {name}, which cannot be fetched ({type(error).__name__})"
        ) from None


def local_plan(path: str) -> Path:
    """The local path of a plan; `default` is the embedded model's, unless a file or folder has that name."""
    return EMBEDDED_PLAN if path == DEFAULT and not Path(path).exists() else Path(path)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _short(path: Path) -> str:
    """A path for an error message: quoted, since it may contain anything, and shortened if very long."""
    text = str(path)
    return repr(text if len(text) <= 200 else f"{text[:80]}…{text[-80:]}")


def _locate(path: str) -> Path:
    if not path.strip():
        raise DepthDecayError(
            f"the plan's path is empty; expected a .json file, a folder with {PLAN_FILE}, "
            "or a Hugging Face repository as owner/name"
        )
    local = local_plan(path)
    try:
        if local.is_file():
            return local
        if local.is_dir():
            if (local / PLAN_FILE).is_file():
                return local / PLAN_FILE
            raise DepthDecayError(f"the folder {path} contains no {PLAN_FILE}")
    except OSError as error:
        raise DepthDecayError(f"{path} cannot be read: {error.strerror or error}") from None
    if path.endswith(".json") or not _REPOSITORY_ID.fullmatch(path):
        raise DepthDecayError(
            f"there is no plan at {path!r}; expected a .json file, a folder with {PLAN_FILE}, "
            "or a Hugging Face repository as owner/name"
        )
    try:
        return _download(path)
    # The Hub fails in many ways (offline, unknown, private, no such file); all mean the same to the user.
    except Exception as error:
        raise DepthDecayError(
            f"{path} is neither a local file or folder nor a reachable Hugging Face repository with a {PLAN_FILE} "
            f"({type(error).__name__})"
        ) from None


def _download(repository: str) -> Path:
    """The newest plan of a repository, or the cached one if the Hub cannot be reached."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    from depthdecay.quiet_libraries import quiet_libraries

    with quiet_libraries(downloads=False):
        try:
            # Checked first: without a network the download itself would retry for half a minute.
            get_hf_file_metadata(hf_hub_url(repository, PLAN_FILE), timeout=_HUB_SECONDS)
        except HfHubHTTPError:
            raise  # the Hub was reached but has no such plan
        except Exception:
            fetched = try_to_load_from_cache(repository, PLAN_FILE)
            if not isinstance(fetched, str):
                raise
            return Path(fetched)
        return Path(hf_hub_download(repository, PLAN_FILE))
