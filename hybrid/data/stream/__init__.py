"""Streams: rows that trainers read once and in order, without preparation.

``units`` finds the files that are complete, and divides their rows among steps and trainers.
``kafka_partitions`` does both for a Kafka topic. ``stream_cursor`` waits for units, and tracks the position.
"""
