"""OpenAI's dialect: chat completions, completions and models, under the Workers AI prefix and under /v1."""
