"""The training job: stitches the packages together. See config.py (what a run is), trainer.py (a step) and job.py (a
run).
"""
