"""Columns of a file to values: canonical texts, numbers, dates, buckets, crosses, weighted ids and targets.

``features`` computes each column of data.sparse, ``targets`` the labels, and ``invalid_rows`` collects
invalid rows.
"""
