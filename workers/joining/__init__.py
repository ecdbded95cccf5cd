"""A role's way into a cluster and out of it, and how it learns that another one is gone.

Begin with ``bootstrap``. Members speak through a ``channel`` that asks for the secret; the master's side of
it is the ``rendezvous`` (``keys``, ``listener``), which torch sees as a ``store``. ``heartbeat`` gives
signs of life, ``alarm`` raises what they tell in the main thread. Every role calls it.
"""
