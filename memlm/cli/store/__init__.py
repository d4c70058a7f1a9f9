"""The commands on datastores: build, change, check, search, shard."""
