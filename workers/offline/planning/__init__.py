"""From a configuration to what a cluster of it would do, without one.

Begin with ``demand``, which counts what a step asks of each role; ``costs`` says what that costs, and
``forecast`` what comes of it on given hosts. ``hybrid plan`` calls them, and ``scripts/bench scaling``, which
measures the costs.
"""
