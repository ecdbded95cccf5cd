"""``python -m workers``: the same as the command ``hybrid``."""

from workers.cli import main

if __name__ == "__main__":
    main()
