"""Whole runs copied with all that belongs to them: a merge into another database, a fork inside one."""
