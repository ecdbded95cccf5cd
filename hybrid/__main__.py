"""``python -m hybrid``: the command line."""

from hybrid.module_imports import exclude_working_directory

if __name__ == "__main__":
    exclude_working_directory()  # first, since the user may have a folder "workers"
    from workers.cli import main

    main()
