"""asv benchmarks of the cases "data.*"."""

from suites import fill

fill(globals(), "data")
