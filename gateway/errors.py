"""What the gateway refuses or can't finish. Codes are stable; api/errors.py gives each its status in both dialects.

GatewayError
├── ModelNotFound          no such model in the catalogue
│   └── ModelNameInvalid   nor could there be one of that name
├── ModelRetired           it was served until some day
├── ReplicaNotFound        no such replica is served
├── RolloutNotFound        the model has none
├── RolloutRefused         it can't be changed so
├── TaskMismatch           a model of another task than the route's
├── PromptInvalid          the prompt can't be rendered or tokenised
├── PromptTooLong          it can never fit: carries the numbers
├── AnswerTooLarge         more than is put together of one that is not streamed
├── Rejected               before the queue, no engine work done
│   ├── CapacityExceeded   rejectIfBusy, or the predicted wait passes the deadline
│   ├── ModelWarming       its engines were asleep and won't be awake in time
│   ├── QueueFull
│   └── Draining           this process is shutting down
├── Evicted                left the queue at its deadline
├── AnswerUnknown          no such answer is kept for the account
├── FirstByteLate          no answer began within the bound that the client set
├── RegionNotServed        the model has no replica where the account's prompts may go
├── EngineUnavailable      no healthy replica of the model
├── StoredFileNotFound     BatchNotFound        of this account there is none
├── StoredFileInvalid      BatchInvalid         what was sent can't be one
├── StoredFilesFull        BatchesFull          the account has as many as it may
├── BatchNotCancellable    it has ended
└── GenerationFailed       the engine failed after dispatch; a BackendError is its cause
    └── GenerationCutOff   this process stopped before the answer was complete
"""


class GatewayError(Exception):
    """Base of all gateway errors: a stable public `code`, a public message, and when a retry may help."""

    code = "gateway_error"

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class ModelNotFound(GatewayError):
    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model!r} does not exist or is not served here.")
        self.model = model


class ModelNameInvalid(ModelNotFound):
    code = "invalid_model_name"


class ModelRetired(GatewayError):
    """No other model answers in its name: a client chooses one, and its price."""

    code = "model_retired"

    def __init__(self, model: str, day: str) -> None:
        super().__init__(f"The model {model} was retired on {day}. Please ask for another one.")
        self.model = model


class ModelDisabled(GatewayError):
    """An operator has switched it off, for a while."""

    code = "model_disabled"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model} is switched off at the moment. Try again later.")
        self.model = model


class ReplicaNotFound(GatewayError):
    code = "replica_not_found"

    def __init__(self, replica_id: str) -> None:
        super().__init__(f"No replica {replica_id!r} is served here.")


class RolloutNotFound(GatewayError):
    code = "rollout_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model!r} has no rollout.")


class RolloutRefused(GatewayError):
    code = "rollout_refused"


class TaskMismatch(GatewayError):
    code = "wrong_task"

    def __init__(self, model: str, task: str) -> None:
        super().__init__(f"The model {model} is for {task}, which is not what this request asks of it.")


class PromptInvalid(GatewayError):
    code = "invalid_prompt"


class RequestRefused(GatewayError):
    """The engine answered with a 4xx: it did no work, and will not do any for this request."""

    code = "request_refused"


class PromptTooLong(GatewayError):
    """The prompt alone exceeds the context or the whole cache of a replica: waiting can't help.

    at_least: it was not counted to its end. subject: what has so many tokens. limit: what sets the limit.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        *,
        prompt_tokens: int,
        limit_tokens: int,
        at_least: bool = False,
        subject: str = "The prompt has",
        limit: str = "its context less one token of output",
    ) -> None:
        super().__init__(
            f"{subject} {'more than ' if at_least else ''}{prompt_tokens} tokens; "
            f"this model takes at most {limit_tokens} ({limit})."
        )
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class AnswerTooLarge(GatewayError):
    """As asked for, it could take more memory than one answer may that is not streamed."""

    code = "answer_too_large"


class Rejected(GatewayError):
    """Refused before the queue: no engine saw the request."""

    code = "rejected"


class CapacityExceeded(Rejected):
    code = "capacity_exceeded"


class ModelWarming(Rejected):
    code = "model_warming"


class QueueFull(Rejected):
    code = "queue_full"


class Draining(Rejected):
    code = "draining"


class Evicted(GatewayError):
    """Waited in the queue until its deadline: no engine saw the request."""

    code = "queue_deadline_exceeded"


class AnswerUnknown(GatewayError):
    code = "response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"No response {response_id[:64]!r} is kept. Responses are kept for a time if they were asked for with "
            "store: true; without one, send the whole conversation as input."
        )


class FirstByteLate(GatewayError):
    """The attempt was given up; what its engine did by then is charged, as if the client had left."""

    code = "first_byte_late"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"No answer began within the {seconds:g} seconds that this request allows.")


class RegionNotServed(GatewayError):
    """Nothing overrides where an account's prompts may go: another model may be served there, or none."""

    code = "region_not_served"

    def __init__(self, model: str, regions: frozenset[str]) -> None:
        super().__init__(
            f"The model {model} is not served in a region where this account's prompts may go "
            f"({', '.join(sorted(regions))})."
        )
        self.model = model


class EngineUnavailable(GatewayError):
    code = "engine_unavailable"


class GenerationFailed(GatewayError):
    """The engine failed after the request was dispatched. Nobody pays for it."""

    code = "generation_failed"


class GenerationCutOff(GenerationFailed):
    """The process stopped before the answer was complete. What was made until then is charged."""

    code = "generation_cut_off"


class StoredFileNotFound(GatewayError):
    code = "file_not_found"

    def __init__(self, file_id: str) -> None:
        super().__init__(f"No such File object: {file_id}")


class StoredFileInvalid(GatewayError):
    """param: the field of the upload that is wrong."""

    code = "invalid_file"

    def __init__(self, message: str, *, param: str = "file") -> None:
        super().__init__(message)
        self.param = param


class StoredFilesFull(GatewayError):
    code = "files_full"


class BatchNotFound(GatewayError):
    code = "batch_not_found"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"No batch found with id {batch_id!r}.")


class BatchInvalid(GatewayError):
    code = "invalid_batch"


class BatchesFull(GatewayError):
    code = "batches_full"


class BatchNotCancellable(GatewayError):
    code = "batch_not_cancellable"
