"""The roles of a cluster, each from joining it to leaving it.

Begin with ``master``, which starts, watches and stops the job. Trainers and workers serve its calls
(``role_main``). ``diagnosis`` finds the role that caused a failure.
"""
