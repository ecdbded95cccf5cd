"""Run configs/cluster/slurm.sh on a Slurm cluster of one machine: ``scripts/slurm``.

Begin with ``__main__``. ``daemons`` starts and stops the processes of Slurm.
"""
