"""Rows of a prepared data set to batches, read ahead in the background.

Begin with ``batch_loader``.
"""
