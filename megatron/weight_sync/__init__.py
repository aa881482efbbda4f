"""Lossless weight synchronisation from a trainer to rollout engines (torch and safetensors only)."""
