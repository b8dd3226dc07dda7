"""Workers AI's dialect: run, model search and token verification, in Cloudflare's envelope."""
