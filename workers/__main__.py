"""``python -m workers``: the same as the command ``hybrid``."""

from workers.module_imports import search_working_directory_last

if __name__ == "__main__":
    search_working_directory_last()  # first, since the user may have a folder "hybrid"
    from workers.cli import main

    main()
