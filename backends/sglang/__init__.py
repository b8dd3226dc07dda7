"""SGLang as an engine: its command lines (launch.py), and whether a running server is what the file promises
(attach.py). What it speaks is the one engine contract (backends/client.py).
"""
