"""Jobs on datastores: their records, and the process that runs one."""
