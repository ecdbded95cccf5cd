"""The worker's side of a step: what it hosts, and when the gradients of all trainers become an update.

``barrier`` collects the gradients of all trainers, applies them as one update, and runs the lookups that wait
for it. ``ledger`` decides which update is next, and which trainers are missing. ``hosted_module`` is the base
of what a worker hosts: tables (``hybrid/embedding/worker``) and dense nets (``hybrid/dense/hosted_net.py``).
"""
