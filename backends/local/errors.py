"""What the engine refuses, in words its HTTP surface can map to a status.

EngineError
├── StartError           the process can't start: a folder that can't be served, a pool without a page
├── InvalidRequestError  400: the request can never be served as it stands
├── BodyTooLargeError    413: more bytes than any prompt that fits
├── BusyError            409: what only an idle engine can do
├── QueueFullError       503: too many requests wait already
├── NotReadyError        503: the model is still loading
├── ReleasedError        503: the memory was given up, and not taken back
└── GivenUpError         a request that was begun and could not be ended
"""

from typing import ClassVar


class EngineError(Exception):
    """Base of all expected failures; the message is safe to show to a client."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "InternalServerError"


class StartError(EngineError):
    """The model folder lacks something or asks for what this engine does not have, or a setting can't hold."""


class InvalidRequestError(EngineError):
    status = 400
    kind = "BadRequestError"


class BodyTooLargeError(EngineError):
    status = 413
    kind = "BadRequestError"


class BusyError(EngineError):
    status = 409
    kind = "ConflictError"

    def __init__(self) -> None:
        super().__init__("Requests run or wait: only an idle engine can give up its memory.")


class QueueFullError(EngineError):
    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self) -> None:
        super().__init__("The request queue is full.")


class NotReadyError(EngineError):
    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self) -> None:
        super().__init__("The model is still loading.")


class ReleasedError(EngineError):
    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self) -> None:
        super().__init__("The engine has given up its memory, and has not been told to take it back.")


class GivenUpError(EngineError):
    """The engine began a request and could not end it."""

    def __init__(self, message: str, *, status: int, kind: str) -> None:
        super().__init__(message)
        self.status = status  # type: ignore[misc]  # a class's usual status, this one's own
        self.kind = kind  # type: ignore[misc]  # as above
