"""``hybrid plan``: where tables lie, what a step sends, the memory it needs, and its expected speed.

Begin with ``plan_report``, which prints it.
"""
