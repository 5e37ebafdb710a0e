"""KV-cache memory as the allocators of serving engines plan it, one engine a file."""
