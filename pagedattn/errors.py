"""The typed errors. Every message says which argument, what was expected, what came, and the remedy."""

from __future__ import annotations


class PagedAttnError(Exception):
    """Base of every error that pagedattn raises on purpose."""


class InvalidInputError(PagedAttnError, ValueError):
    """An argument has the wrong rank, shape, dtype, device, stride or value."""

    def __init__(self, param: str, expected: str, got: object, remedy: str = "") -> None:
        self.param, self.expected, self.got = param, expected, got
        super().__init__(f"{param} must be {expected}, got {got}" + (f"; {remedy}" if remedy else ""))


class UnsupportedError(PagedAttnError, NotImplementedError):
    """No backend (or not the one asked for) can do what was asked; the message lists every reason."""


class NoBackendError(UnsupportedError):
    """No backend (or not the one asked for) serves a layer; the message lists why each was refused."""


class CapacityError(PagedAttnError, RuntimeError):
    """A pool, a table or a workspace is too small; says how much was needed and how much there is."""


class RequestError(PagedAttnError, ValueError):
    """One request to the engine cannot be served; the others are unaffected."""

    def __init__(self, message: str, request_id: str | None = None) -> None:
        self.request_id = request_id
        super().__init__(f"request {request_id}: {message}" if request_id else message)


class QueueFullError(RequestError):
    """As many requests wait as the engine takes; the same request may be served later."""


class WeightsError(PagedAttnError, ValueError):
    """A checkpoint is missing tensors, has unexpected ones, or one of the wrong shape or dtype."""


class DownloadError(PagedAttnError, RuntimeError):
    """A package that a model is in could not be had from the package index."""


class SecurityError(PagedAttnError, ValueError):
    """A file, path or template of a model folder was refused because it could run code or escape the folder."""


class EngineDeadError(PagedAttnError, RuntimeError):
    """The engine cannot go on (a worker died, the device failed); every pending request ends with this."""


def describe_error(error: BaseException) -> str:
    """The class of an error that another library raised, and what it says; the class alone where it says nothing."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
