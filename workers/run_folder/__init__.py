"""The files of a run.

Begin with ``run_access``, which has the paths of the files, reads the progress of a run, locks its folder,
and copies files to a store. ``run_files`` writes the files, ``step_profile`` makes the profile of some steps,
and ``run_report`` makes the page with the results.
"""
