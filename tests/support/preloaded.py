"""Imports that take long, for a process from which others are forked."""

# ruff: noqa: F401

from cryptography.hazmat.backends import default_backend

from workers.module_imports import fast_imports

with fast_imports():
    import pytest  # by modules of cases
    import support.cluster
    import support.forked_commands
    import support.reporting
    import torch._dynamo

    import workers.master

    default_backend()  # which each role would import with its first key
