"""The dense model: maths only, no mesh, no loss, no files."""

from gem_pipelines.model.build import build_model, table_specs
from gem_pipelines.model.flops import model_flops, training_flops

__all__ = ["build_model", "model_flops", "table_specs", "training_flops"]
