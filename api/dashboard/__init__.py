"""The dashboard: pages for people, under /dashboard, rendered here. app.py lists the routes; tables need no scripts.

Tenants' figures come from billing/dashboard and the queries of the console's API, operators' from the gateway.
"""
