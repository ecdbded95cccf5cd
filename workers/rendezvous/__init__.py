"""A role's way into a cluster and out of it, and how it learns that another one is gone.

Begin with ``bootstrap``. A role has the master's ``address``, and gets the rest by ``connecting``: members
speak through a ``channel`` that asks for the secret; the master's side of it is the ``rendezvous`` (``keys``,
``listener``), which torch sees as a ``store``. ``admission`` is what a role says of itself and is told,
``interface`` and ``open_files`` what its host must have, ``ways`` how hosts must reach each other.
``heartbeat`` gives signs of life, by which a role is known to be there (``presence``), ``alarm`` raises what
they tell in the main thread. Every role calls it.
"""
