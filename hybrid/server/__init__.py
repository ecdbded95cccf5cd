"""The worker's side of a step: hosted modules, and the barrier that turns gradients into updates.

``barrier`` collects the gradients of all trainers, applies them as one update, and runs the lookups that wait
for it. ``barrier`` also has the base class of hosted modules: tables (``hybrid/embedding/worker``) and dense
nets (``hybrid/dense/hosted_net.py``). ``ledger`` decides which update is next, and which trainers are
missing.
"""
