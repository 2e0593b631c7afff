"""Planning a run on paper: which mesh, what it moves, what it holds, how long a step takes. One CPU, no cluster.

workload.py         what is trained, as numbers; workloads.py: GEM-like ones; recipe.py: that of a recipe
moves.py            what travels in a step, by axis: exact, checked against counted bytes
estimate.py         memory and step time of one mesh: a model with stated assumptions
search.py           all meshes of a world size, ranked
scaling.py          8 to 4,096 ranks, by table strategy
text.py, picture.py what people read
"""
