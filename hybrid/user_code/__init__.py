"""User code: import by name, distinction from libraries, and signatures.

``user_modules`` replaces functions and values of user modules by names, imports them by name, and describes
their exceptions. ``run_signature`` signs the code and the paths that a configuration names.
"""
