"""``python -m workers``: the same as the command ``hybrid``."""

from workers.module_imports import exclude_working_directory

if __name__ == "__main__":
    exclude_working_directory()  # first, since the user may have a folder "hybrid"
    from workers.cli import main

    main()
