"""Checkpoints: saving and loading on any mesh, whole state dicts, and safetensors folders."""
