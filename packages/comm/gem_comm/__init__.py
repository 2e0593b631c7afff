"""Topology, meshes and collectives of a distributed run; see interface.py for all that is public."""
