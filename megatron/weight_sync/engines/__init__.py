"""Receivers for inference engines that fuse and shard weights, and adapters for SGLang and vLLM."""
