"""A real Slurm on one machine, and configs/cluster/slurm.sh on it: see scripts/slurm.

Begin with ``__main__``. ``daemons`` starts and ends Slurm's processes.
"""
