"""A job on a cluster, from the master's side: its objects on other roles, and the calls to them.

Begin with ``session``, with prepared data or without. ``deployment`` creates, saves and
loads the objects, ``remote_trainer`` is the one on each trainer, ``trainer_script`` runs a script there.
``shared_folders`` checks what other hosts see.
"""
