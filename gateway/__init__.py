"""From an accepted request to a settled stream: admit, hold, wait, dispatch, relay, settle. Knows no HTTP framework."""
