"""asv benchmarks of the cases "comm.*"."""

from suites import fill

fill(globals(), "comm")
