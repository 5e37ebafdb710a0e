"""Post-hoc (training-free) KV-cache compression: the NLL cost of rules that evict keys from a dense model's cache."""
