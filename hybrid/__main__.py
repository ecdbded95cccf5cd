"""``python -m hybrid``: the command line."""

from workers.module_imports import search_working_directory_last

if __name__ == "__main__":
    search_working_directory_last()
    from workers.cli import main

    main()
