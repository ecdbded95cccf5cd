"""Streams: rows that trainers read once and in order, without preparation.

``units`` finds complete files and folders, and divides their rows among steps and trainers.
``kafka_partitions`` divides messages of a topic. ``stream_cursor`` keeps the position, and waits for rows.
"""
