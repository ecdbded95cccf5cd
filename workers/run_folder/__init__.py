"""The files of a run.

Begin with ``run_access``: it has their paths, reads the progress of a run, locks its folder and copies its
files to a store. ``run_files`` writes them; ``step_profile`` makes the profile of some steps, and
``run_report`` the page with the results.
"""
