"""Code of the user's own: found by its name, told apart from the project's, signed.

Begin with ``names``: how functions and values of the user's travel, and are looked up where they run.
``traces`` has what an exception out of such code says, and ``signature`` whether a configuration's code is
the user's own choice. ``trust`` and ``dense`` look code up here.
"""
