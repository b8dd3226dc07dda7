"""Facts that an account's own programs are told of: signed as Standard Webhooks, at least once, in order."""
