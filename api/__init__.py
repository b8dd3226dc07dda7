"""The only HTTP: two dialects (Workers AI, OpenAI), the console, health, and the composition root."""
