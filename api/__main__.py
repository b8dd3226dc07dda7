"""`python -m api`: the same as `pagegate serve`."""

from api.cli.main import run

if __name__ == "__main__":
    run(["serve"])
