"""asv benchmarks of the cases "datasets.*"."""

from suites import fill

fill(globals(), "datasets")
