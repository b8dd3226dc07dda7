"""Two engine processes as one: `--role prefill` computes prompts, `--role decode` generates from the pages it is sent.

Both get the same body on the same route, with three fields more, named as SGLang's:

    bootstrap_host   where the prefill process hands pages over: a host, or `unix:` and the path of a socket
    bootstrap_port   its port (`--disaggregation-bootstrap-port`); no meaning with a socket's path
    bootstrap_room   an integer of up to 63 bits that no other request of this time has; without it both answer 400

Decode takes pages for the prompt, then connects to prefill and names the room; prefill computes the prompt once
somebody has come to its room, samples the first token, sends pages and token, and answers with that one token
(`length`) when decode has them. Decode's answer is the request's: from the first token on, with prefill's cached tokens
in its usage. Either side's end ends the request on the other: decode says 500 "Lost connection with prefill instance".
Both can be aborted by `rid`, whatever they wait for. Page size, the cache's type and the model's shape must be equal on
both sides; weights may differ. Decode keeps no prefixes unless told to (`--disaggregation-decode-enable-radix-cache`).

handover.py is what travels and how it is checked, frames.py the bytes on the connection, offer.py prefill's side of it,
fetch.py decode's.
"""
