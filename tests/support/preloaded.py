"""All that takes its time to import, for processes to be forked from one that has imported it."""

# ruff: noqa: F401

from cryptography.hazmat.backends import default_backend

from workers.module_imports import importing_much

with importing_much():
    import pytest  # by modules of cases
    import support.cluster
    import support.forked_commands
    import support.reporting
    import torch._dynamo

    import workers.roles.master
    import workers.roles.role_main

    default_backend()  # which each role would import with its first key
