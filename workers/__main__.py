"""``python -m workers``: the same as the command ``hybrid``."""

from workers.module_search_path import search_here_last

if __name__ == "__main__":
    search_here_last()  # before the project's modules are: a folder hybrid of the user's is none of them
    from workers.cli import main

    main()
