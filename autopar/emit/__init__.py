"""Emission: from a LOCAL program to the module that runs it."""
