"""A generation tag on every KV page: who may still read it is a comparison, not a belief. Shared by both engines.

table.py keeps the tags (no torch), check.py compares a step's (page, tag) pairs at once, quarantine.py keeps pages
whose tags didn't match out of circulation. Tags say who owns a page, not what is in it.
"""

from http import HTTPStatus

# What an engine that checks page tags says of itself in /metrics, 1 for each scheduler that does.
ACTIVE_METRIC = "pagegate:page_tags_active"
# How an engine ends a request whose page changed hands: an error of this status and message, never a finish reason that
# could be taken for an answer. The gateway recognises it by the message (backends/wire.py).
ABORT_STATUS = HTTPStatus.INTERNAL_SERVER_ERROR
ABORT_TYPE = "integrity_abort"
ABORT_MESSAGE = "a cache page changed hands under this request (page tags)"
