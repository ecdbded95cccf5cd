"""Embedding tables: here what both sides of a lookup know of them.

Begin with ``spec`` (what a table is) and ``placement`` (which worker holds which rows). ``bags`` is what a
lookup asks for and how rows become vectors, ``gradients`` the way back, ``loops`` what of both is compiled.
``trainer`` and ``worker`` hold the two sides; neither imports the other.
"""
