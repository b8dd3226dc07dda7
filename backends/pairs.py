"""Whether the two engines of a prefill/decode pair can share pages, by their own reports. Pure.

Read by gateway/replica.py before a pair's first request. SGLang's handshake compares the same two things, at the first
request and then with an error for each; weights may differ, which is what pairs are for. Scales of the KV cache are no
part of a report: the deployment file compares their digests (topology.py).
"""

from backends.wire import ServerInfo


def disagreement(prefill: ServerInfo, decode: ServerInfo) -> str:
    """A sentence that names the flag and both values; empty: they can share pages."""
    if prefill.page_tokens != decode.page_tokens:
        return f"--page-size is {prefill.page_tokens} on the prefill side and {decode.page_tokens} on the decode side"
    if prefill.kv_cache_dtype != decode.kv_cache_dtype:
        return (
            f"--kv-cache-dtype is {prefill.kv_cache_dtype} on the prefill side and {decode.kv_cache_dtype} on the "
            "decode side"
        )
    if prefill.kv_cache_dtype == "auto":
        return "--kv-cache-dtype is auto on both sides: each takes what its checkpoint says, which may differ"
    return ""
