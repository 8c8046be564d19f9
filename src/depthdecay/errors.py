"""The exceptions users see. The message is one sentence: what was given, what was expected, what to do."""


class DepthDecayError(ValueError):
    """Bad input or an unsupported request. The command line prints its message on one line and exits with code 2."""


class ArgumentError(DepthDecayError):
    """A value that cannot be used. `parameters`: Python names in the message, which the CLI replaces with flags."""

    def __init__(self, message: str, *parameters: str) -> None:
        super().__init__(message)
        self.parameters = parameters


class UnwrittenResultError(DepthDecayError):
    """The measurement finished, but its file could not be written; `report` holds what would be lost."""

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report


class ContextError(DepthDecayError):
    """The prompt leaves no room for an answer in the context."""


class PlanMismatchError(DepthDecayError):
    """The plan was made for a different model."""


class MissingNameError(DepthDecayError):
    """The installed version of a library lacks a private name that depthdecay relies on."""


class UnsupportedModelError(DepthDecayError):
    """Depth decay cannot run this kind of model correctly, so it is refused."""


class GuessedPlanWarning(UserWarning):
    """The plan drops layers by guess, without calibration."""


class NotCapturable(DepthDecayError):
    """The model cannot be captured as CUDA graphs; passes continue eagerly."""


def install(extra: str) -> str:
    """How to install an extra. From source, since the package is not on an index."""
    return f"in depthdecay's source folder, pip install '.[{extra}]'"


def one_line(error: object, limit: int = 200) -> str:
    """A library's message, shortened to fit into a sentence."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def failure(error: Exception) -> str:
    """Why a benchmark row has no figures."""
    return one_line(f"{type(error).__name__}: {error}", limit=300)
