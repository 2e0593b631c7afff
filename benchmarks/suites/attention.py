"""asv benchmarks of the cases "attention.*"."""

from suites import fill

fill(globals(), "attention")
