"""Adapters for training frameworks, built on `actoffload.attach`; imported as ``actoffload.integrations``."""
