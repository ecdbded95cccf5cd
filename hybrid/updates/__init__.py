"""How the gradients of all trainers become updates on a worker.

``ticket`` identifies a lookup and the updates that must precede it. ``update_rules`` has the update modes and
the schedules of learning rates; the master sends the rules of a run to all roles. ``barrier`` collects
gradients, applies them as one update, and runs the lookups that wait for this update. ``ledger`` decides
which update is next. ``hosted_module`` is the base class of tables (``hybrid/embedding/worker``) and dense
nets (``hybrid/dense/hosted_net.py``) on a worker.
"""
