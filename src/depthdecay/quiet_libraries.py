"""Silence other libraries' progress bars and warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries(downloads: bool) -> Iterator[None]:
    """Silence progress bars and warnings while open; in a terminal, a download keeps its bar."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    bars, hub_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    hide = bars and not (downloads and sys.stderr.isatty())
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    if hide:
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if hide:
            logging.enable_progress_bar()
            if not hub_bars:
                disable_progress_bars()
