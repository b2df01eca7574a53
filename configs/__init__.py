"""Configurations: get_config(arg) files of plain data."""
