"""Building blocks that import no other package of this project, such as timings, hashes and huge pages."""
