"""Conversion of columns of files to canonical texts, numbers, dates, crosses, weighted ids and targets.

``column_values`` converts a column, ``model_columns`` computes the features and targets of a model, and
``invalid_rows`` collects invalid rows. ``vocabulary`` finds the index of a text among distinct texts.
"""
