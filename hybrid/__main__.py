"""``python -m hybrid``: the command line."""

from workers.module_imports import exclude_working_directory

if __name__ == "__main__":
    exclude_working_directory()
    from workers.cli import main

    main()
