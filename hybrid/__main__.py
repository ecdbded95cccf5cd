"""``python -m hybrid``: the command line."""

from workers.module_search_path import search_here_last

if __name__ == "__main__":
    search_here_last()
    from workers.cli import main

    main()
