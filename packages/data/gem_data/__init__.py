"""Gemline."""
