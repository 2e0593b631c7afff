"""asv benchmarks of the cases "embeddings.*"."""

from suites import fill

fill(globals(), "embeddings")
