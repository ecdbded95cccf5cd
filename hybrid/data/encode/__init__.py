"""Categorical values to table rows, and numbers to scaled numbers, by statistics of the training rows.

``fitting`` collects statistics. ``feature_encoder`` encodes rows. ``vocabulary_file`` stores vocabularies.
"""
