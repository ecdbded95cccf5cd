"""The trainer's side of embedding tables.

Data flow of an id: ``embeddings`` (configured models) or ``module_lookups`` (custom modules) checks the ids
of a batch (``batch_ids``). A ``route`` turns them into requests. ``lookup`` sends these, waits for the
responses, and sends the gradients back. The same route assembles the responses into vectors.
"""
