"""A trainer's side of the tables: from the ids of a batch to vectors, one call a worker a step.

Begin with ``embeddings``. A ``route`` (``row_route``, ``sequence_route``, ``bag_route``) turns ids into what
each worker is asked for, and answers into vectors; a ``lookup`` is under way, and sends its gradients back.
``training`` calls it with each batch; workers answer through ``wire``.
"""
