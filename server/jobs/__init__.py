"""Long work on datastores: jobs, their records, and the process that does one."""
