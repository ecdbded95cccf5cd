"""Columns to values: canonical texts, numbers, dates, buckets, crosses and weighted ids.

Begin with ``column_values``.
"""
