"""The processes of a cluster: master, trainers, workers, and the launcher that supervises them.

Begin with ``master``, which runs a job from start to end; ``cli`` runs the commands of the user.
"""
