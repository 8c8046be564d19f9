"""The one exception that users see: a sentence saying what was given, what was expected, and what would work."""


class DepthDecayError(ValueError):
    """Bad input or an unsupported request. The command line prints its message on one line and exits with code 2."""


class ArgumentError(DepthDecayError):
    """A value that cannot be used. `parameters`: the Python names in the message, which a command line translates."""

    def __init__(self, message: str, *parameters: str) -> None:
        super().__init__(message)
        self.parameters = parameters


class UnwrittenResultError(DepthDecayError):
    """All was measured, and a file for it could not be written; `report` is what would be lost."""

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report


class ContextError(DepthDecayError):
    """A prompt leaves no room for an answer."""


class PlanMismatchError(DepthDecayError):
    """A plan was made for another model than the one it is applied to."""


class MissingNameError(DepthDecayError):
    """A library's version lacks a private name that depthdecay is built on."""


class UnsupportedModelError(DepthDecayError):
    """The model has a shape that depth decay cannot run correctly, so it is refused."""


class GuessedPlanWarning(UserWarning):
    """A plan drops layers that nobody has measured."""


class NotCapturable(DepthDecayError):
    """The model cannot run as CUDA graphs; passes go on eagerly."""


def install(extra: str) -> str:
    """How to get what an extra brings. From the source: the package is on no index."""
    return f"in depthdecay's source folder, pip install '.[{extra}]'"


def one_line(error: object, limit: int = 200) -> str:
    """A library's message as part of a sentence."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def failure(error: Exception) -> str:
    """Why a row of a bench has no figures."""
    return one_line(f"{type(error).__name__}: {error}", limit=300)
