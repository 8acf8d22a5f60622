"""Copies of a whole database, taken while it is in use, and a database made of one."""
