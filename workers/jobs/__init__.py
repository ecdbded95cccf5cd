"""What a master does with a cluster: train, compare, or call a function of the user's own.

Begin with ``training``, a run from its first step to its last; ``checkpoints`` says when one is due and
which are kept, ``tally`` what is counted in between. ``compare`` takes the job twice, ``snapshot`` says how
far the results are apart, ``own`` calls the user. The master picks one by its task.
"""
