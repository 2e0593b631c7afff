"""The report of a run: one self-contained page and the same tables as Markdown, from the run directory alone."""

from gem_pipelines.report.writing import write_report

__all__ = ["write_report"]
