"""Working in tiles that stay in cache, by torch operations on any device."""
