"""A trainer's side of the tables: from the ids of a batch to vectors, one call a worker a step.

Begin with ``embeddings``. ``routes`` turns ids into what each worker is asked for, and answers into
vectors; ``lookup`` is one that is under way, and sends its gradients back. ``training`` calls it with each
batch; workers answer through ``wire``.
"""
