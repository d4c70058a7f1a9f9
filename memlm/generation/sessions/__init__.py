"""Sessions: KV caches that later requests continue, in memory and on the disk."""
