"""The files of a run.

``run_access`` has their paths, reads the progress of a run, locks its folder and copies its files to a store.
``run_files`` writes them, and ``step_profile`` the profile of some steps.
"""
