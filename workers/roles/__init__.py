"""The roles of a cluster, each from joining it to leaving it.

``master`` starts, watches and stops the job, and finds the role that caused a failure. Trainers and workers
serve its calls (``role_main``).
"""
