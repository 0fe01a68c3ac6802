"""Callbacks for training frameworks: ``integrations.lightning`` and ``integrations.transformers``,
each imported by itself.
"""
