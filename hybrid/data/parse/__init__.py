"""Input files to blocks of typed columns, with exact line numbers and invalid rows by file, line and reason.

Begin with ``sources``.
"""
