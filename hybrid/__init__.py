"""Hybrid-parallel training: data-parallel dense nets, embedding tables on remote workers."""

__version__ = "0.1.0"
