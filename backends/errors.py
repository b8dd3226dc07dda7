"""What can go wrong between the gateway and an engine.

BackendError
├── EngineUnreachable     no connection could be made, or it was lost before the first byte
├── EngineTimeout         connected, but silent past its bound
├── EngineRefused         the engine answered with an error status
├── EngineBroke           the answer began and did not end as promised
└── EngineIntegrityAbort  a page of its cache changed hands under the request
"""


class BackendError(Exception):
    """Base of all engine errors. `code` is stable and public; the message is for the operator, never for a client."""

    code = "engine_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EngineUnreachable(BackendError):
    """No connection, or it closed before the first byte of an answer: nothing was generated that anybody saw."""

    code = "engine_unreachable"


class EngineTimeout(BackendError):
    """The engine kept silent longer than its bound."""

    code = "engine_timeout"


class EngineRefused(BackendError):
    """The engine answered with an error status before generating anything."""

    code = "engine_refused"

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineBroke(BackendError):
    """The engine began to answer and then failed: cut stream, in-band error, or an end without a finish reason."""

    code = "engine_failed"


class EngineIntegrityAbort(BackendError):
    """The engine stopped this request alone, because one of its cache pages had become somebody else's (page tags)."""

    code = "integrity_abort"
