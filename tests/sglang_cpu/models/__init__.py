"""For tests: the models that SGLang is asked to serve, and no others (SGLANG_EXTERNAL_MODEL_PACKAGE in server.py).

By itself it imports all that it knows, two hundred and fifty modules, an eighth of the CPU of a start. Those named
here are SGLang's own; each module has them as `EntryClass`, where SGLang looks.
"""
