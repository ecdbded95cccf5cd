"""The trainer's side of embedding tables.

Data flow of an id: ``embeddings`` checks the ids of a batch (``batch_ids``). A route (``routes``) turns them
into requests. ``lookup`` sends the requests, waits for the responses, and sends the gradients back. The same
route assembles the responses into vectors.
"""
