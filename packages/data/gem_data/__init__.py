"""Gemline's data: the native layout (Parquet + schema.json), its checks, and the resumable loader. See api.py."""
