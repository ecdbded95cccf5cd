"""The processes of a cluster: master, trainers, workers, and the launcher that supervises them.

Begin with ``roles``, what each of them does from start to end; ``cli`` has the commands that people give.
"""
