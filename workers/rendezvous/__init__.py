"""Forming a cluster, leaving it, and detecting the loss of a role.

Start with ``bootstrap``, which every role calls. A role connects to the master through a ``secure_channel``,
and registers (``heartbeat``). The ``rendezvous_server`` of the master accepts the role, stores keys and
values, and receives heartbeats. ``host_setup`` checks a host before torch starts. ``interrupt`` raises errors
of other threads in the main thread.
"""
