"""User code: found by its name, distinguished from libraries, signed.

``function_names`` sends functions and values of user modules by name and looks them up. ``tracebacks``
describes exceptions in user code. ``run_signature`` signs the code and the paths that a configuration names.
"""
