"""What a person sees while a command runs, and what becomes of that where the screen goes away.

Begin with ``terminal``, the view that every command prints through. ``progress`` is its live region,
``data_notes`` what to know of the rows before trusting a number; ``lasting_output`` and ``visible`` keep
output from doing harm.
"""
