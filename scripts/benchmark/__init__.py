"""Speed, measured beside other systems on the same machine: see docs/performance.md."""
