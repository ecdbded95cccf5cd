"""User code: import by name, distinction from libraries, and signatures.

``user_modules`` imports user code by name, and describes its exceptions. ``run_signature`` signs the code and
the paths that a configuration names.
"""
