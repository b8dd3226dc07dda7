"""Requests that may wait: files of them, kept in SQL, run line by line while an engine has nothing better to do.

batch.py has the words and the rules, store.py and files.py what is kept, runner.py the deeds. What a line asks and how
its answer reads is a dialect's, handed in as a Form (runner.py). Knows no HTTP.
"""
