"""``python -m horosphere`` is the command ``horosphere``."""

from horosphere.cli import app

if __name__ == "__main__":
    app()
