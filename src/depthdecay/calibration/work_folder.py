"""The work folder of a calibration: keeps finished stages, so that an interrupted run can resume."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from depthdecay.errors import DepthDecayError
from depthdecay.files import write_whole

WORK_FOLDER = ".work"


class WorkFolder:
    """JSON by name, valid for one set of inputs: another model, prompts or settings start from scratch."""

    def __init__(self, folder: Path, inputs: dict[str, Any]) -> None:
        self.folder = folder / WORK_FOLDER
        self.key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    def read(self, name: str) -> Any | None:
        try:
            content = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
            return content["value"] if content["key"] == self.key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, name: str, value: Any) -> None:
        file = self.folder / f"{name}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps({"key": self.key, "value": value}))
        except OSError as error:
            raise DepthDecayError(f"cannot write to {self.folder}: {error.strerror or error}") from None

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
