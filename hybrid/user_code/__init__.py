"""User code: import by name, descriptions of its exceptions, and signatures.

``user_modules`` imports user code by name, and describes its exceptions. ``run_signature`` signs the values
of a configuration that decide what a command does, such as names of code, paths and hosts.
"""
