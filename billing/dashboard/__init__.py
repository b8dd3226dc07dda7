"""What the tenant's dashboard shows, as plain values: explorer.py, overview.py and cost_lines.py. Knows no HTTP."""
