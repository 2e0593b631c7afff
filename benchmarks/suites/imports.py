"""asv benchmarks of the cases "imports.*"."""

from suites import fill

fill(globals(), "imports")
