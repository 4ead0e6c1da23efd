"""Adapters translate between an engine's types and kvtier's. They decide nothing."""
