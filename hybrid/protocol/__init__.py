"""What trainers and workers agree on about a step. Both sides compute with these, and neither asks the other.

Begin with ``ticket``: what a lookup says of itself. ``rules`` is how gradients become updates on every
worker of a run, ``schedule`` the factor of the learning rates at a step. The master makes the rules of a
run and gives them to everybody; ``hosting`` goes by them.
"""
