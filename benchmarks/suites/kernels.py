"""asv benchmarks of the cases "kernels.*"."""

from suites import fill

fill(globals(), "kernels")
