"""A worker's side of a step: what it hosts, and when that is updated.

Begin with ``barrier``, which gathers the gradients of all trainers, makes one update of them, and answers
the lookups that waited for it. ``ledger`` knows which update is next, and who is missing. ``hosted`` is the
base of what a worker hosts: tables (``embedding/worker``) and dense nets (``dense/remote``).
"""
