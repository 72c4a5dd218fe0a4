"""``python -m autopar``."""

from autopar.cli.main import entry

if __name__ == "__main__":
    entry()
