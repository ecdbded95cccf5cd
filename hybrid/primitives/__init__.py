"""Building blocks that depend on nothing else: timings, hashes, huge pages, deferred responses.

Begin with ``deferred_response``, which hosted objects return when a result comes later.
"""
