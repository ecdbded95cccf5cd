"""The protocol of a step between trainers and workers.

``ticket`` identifies a lookup. ``update_rules`` define how gradients become updates, and the factor of the
learning rates in a step. The master creates the rules of a run and sends them to all roles.
"""
