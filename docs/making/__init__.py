"""The pages of docs/reference."""
