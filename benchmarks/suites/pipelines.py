"""asv benchmarks of the cases "pipelines.*"."""

from suites import fill

fill(globals(), "pipelines")
