"""Samples outside a database: files, objects and slime's dicts, written by an export and read by an import."""
