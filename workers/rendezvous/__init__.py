"""How roles find each other, form a cluster and leave it, and how they notice that another role is gone.

Start with ``bootstrap``, which every role calls. A role connects to the ``master_address`` through a
``secure_channel``, and registers (``heartbeat``). The ``rendezvous_server`` of the master accepts it, stores
the keys of the ``rendezvous_store``, and receives heartbeats. ``host_requirements``
checks a host before torch starts. ``interrupt`` raises errors of other threads in the main thread.
"""
